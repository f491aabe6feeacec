// SPDX-License-Identifier: Apache-2.0
// New tensors for files that will be written, and the elements of stored tensors from which they are made: by name or
// by renames, in either direction. A fused tensor consists of several pieces; splitting it makes several tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/files/weight_files.h"
#include "checkpoint/format/box.h"
#include "checkpoint/plan/weight_plan.h"

namespace fsdp::checkpoint {

using SpreadTensors = std::map<std::string, SpreadTensor>;

// A box of a stored tensor that becomes a box of a new one.
struct TensorPiece {
  std::string name;  // name of the stored tensor
  const SpreadTensor *from = nullptr;
  Box source;               // box in the stored tensor
  Box to;                   // box in the new tensor
  bool transposed = false;  // element (r, c) of `source` is element (c, r) of `to`
};

struct NewTensor {
  std::string name;
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<TensorPiece> pieces;  // together the pieces fill the tensor
  std::vector<TensorPiece> twins;   // tied tensors that become one tensor: they must have the same bits as the pieces
  bool turns() const;               // is any piece transposed?
};
// Plans new tensors with our names from other programs' tensors. Throws INVALID_ARGUMENT, with names, if rows come
// twice or are missing, or if shapes or types do not fit. `theirs` must live as long as the result.
std::vector<NewTensor> plan_import(const SpreadTensors &theirs, std::span<const Rename> renames);
// The reverse of plan_import(): plans tensors with the other program's names from ours. If several renames without a
// row_count lead to one tensor of ours, each has the rows up to the first row of the next. `as` is the type to which
// all convertible tensors are converted; NULL: their types stay.
std::vector<NewTensor> plan_export(const SpreadTensors &ours, std::span<const Rename> renames,
                                   const ElementType *as = nullptr);

// Reads the elements of new tensors, in the order in which they are written. Elements are read from the files that have
// them, verified if these files have checksums, converted and transposed.
//
//   files --blocks, verified--> runs of a piece --straight--> the writer's block
//                                               --transposed, element by element--> a window of rows --> the block

// Converts elements, rounding to nearest even. The addresses are aligned to the elements.
using CastElements =
    std::function<void(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count)>;

class NewTensorReader {
 public:
  // A transposed tensor is assembled in windows of rows of this size. The stored matrix is read once for each window.
  static constexpr uint64_t window_bytes = uint64_t{32} << 20;
  // Limit of files that are open at once, with their parsed headers.
  static constexpr size_t max_open = 128;

  NewTensorReader(const WeightFiles &files, CastElements cast)
      : files_(files), cast_(std::move(cast)), buffer_(ShardReader::buffer_bytes) {}

  // Reads bytes [first, first + to.size()) of a tensor, which must be whole elements. The bytes of one tensor must be
  // read in rising order. Throws INVALID_ARGUMENT, with file, tensor and bytes, if a file was changed or if a twin has
  // other bits.
  void read(const NewTensor &tensor, uint64_t first, std::span<std::byte> to);
  // The number of bytes read from files so far.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  // Elements [first, first + bytes / element) of a tensor.
  struct NewElements {
    const NewTensor *tensor = nullptr;
    uint64_t first = 0;
    std::span<std::byte> to;
  };
  struct OpenFile {
    explicit OpenFile(ShardReader opened);
    ShardReader reader;
    std::unordered_map<std::string, uint32_t> numbers;  // key: name; value: number of the tensor
    uint64_t used = 0;
  };
  OpenFile &open(uint32_t file);
  void make(const NewElements &range, std::span<const Box> boxes);
  void fill(const NewElements &range, std::span<const Box> boxes, const TensorPiece &piece);
  void fill_from(const NewElements &range, std::span<const Box> sources, const TensorPiece &piece, uint32_t file);
  void take(const NewElements &range, const TensorPiece &piece, uint64_t at, std::span<const std::byte> elements);
  void convert(const ElementType &from, const ElementType &to, std::span<const std::byte> elements, std::byte *out);
  void move_window(const NewTensor &tensor, uint64_t element);

  const WeightFiles &files_;
  CastElements cast_;
  AlignedBytes buffer_;
  std::map<uint32_t, std::unique_ptr<OpenFile>> open_;
  uint64_t uses_ = 0, bytes_read_ = 0;
  NewElements window_;  // the current window of the transposed tensor that is being read
  std::vector<std::byte> window_memory_, twin_memory_;
};

}  // namespace fsdp::checkpoint
