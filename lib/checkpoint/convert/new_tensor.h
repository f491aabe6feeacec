// SPDX-License-Identifier: Apache-2.0
// Tensors of files that are to be written, and which elements of stored ones they are made of: by name, or as renames
// say, in either direction. A fused tensor is several pieces, and so is what it is split into again.
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

// A box of a stored tensor that is a box of a new one.
struct TensorPiece {
  std::string name;  // of the stored one
  const SpreadTensor *from = nullptr;
  Box source;               // in the stored tensor
  Box to;                   // in the new one
  bool transposed = false;  // element (r, c) of `source` is element (c, r) of `to`
};

struct NewTensor {
  std::string name;
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<TensorPiece> pieces;  // fill it
  std::vector<TensorPiece> twins;   // tied here, one tensor there: they must have the bits of the pieces

  bool turns() const;  // is any of it transposed?
};

// What others' tensors are called here. Refuses, by name, rows that come twice or not at all, and shapes and types that
// do not fit: INVALID_ARGUMENT. The tensors live as long as what is returned.
std::vector<NewTensor> plan_import(const SpreadTensors &theirs, std::span<const Rename> renames);
// The way back: what ours were called there. Of renames without a row_count that go to one tensor of ours, each has
// the rows up to the next one's. `as`: of all that can be converted; NULL: as they are.
std::vector<NewTensor> plan_export(const SpreadTensors &ours, std::span<const Rename> renames,
                                   const ElementType *as = nullptr);

// The elements of new tensors, as they are written one after the other: read out of the files that have them, verified
// where these have sums, converted and turned.
//
//   files --blocks, verified--> runs of a piece --straight--> the writer's block
//                                               --transposed, element by element--> a window of rows --> the block

// Rounds to nearest even. The addresses are aligned to their elements.
using CastElements =
    std::function<void(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count)>;

class NewTensorReader {
 public:
  // Rows of transposed tensors that are put together at once: a stored matrix is read once for each of these windows.
  static constexpr uint64_t window_bytes = uint64_t{32} << 20;
  // Files that are open at once, with what their headers say.
  static constexpr size_t max_open = 128;

  NewTensorReader(const WeightFiles &files, CastElements cast)
      : files_(files), cast_(std::move(cast)), buffer_(ShardReader::buffer_bytes) {}

  // Bytes [first, first + to.size()) of one, whole elements; those of one tensor in rising order. INVALID_ARGUMENT,
  // naming file, tensor and bytes, where a file is not what was written, or where a twin has other bits.
  void read(const NewTensor &tensor, uint64_t first, std::span<std::byte> to);
  // Of files, so far.
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
    std::unordered_map<std::string, uint32_t> numbers;  // of tensors, by name
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
  NewElements window_;  // of the transposed tensor that is being read
  std::vector<std::byte> window_memory_, twin_memory_;
};

}  // namespace fsdp::checkpoint
