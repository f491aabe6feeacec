// SPDX-License-Identifier: Apache-2.0
// The elements of new tensors, as they are written one after the other: read out of the files that have them, verified
// where these have sums, converted and turned.
//
//   files --blocks, verified--> runs of a piece --straight--> the writer's block
//                                               --transposed, element by element--> a window of rows --> the block
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/convert/new_tensor.h"
#include "checkpoint/files/weight_files.h"

namespace fsdp::checkpoint {

// Rounds to nearest even. The addresses are aligned to their elements.
using CastElements =
    std::function<void(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count)>;

class NewTensorReader {
 public:
  // Rows of transposed tensors that are put together at once: a stored matrix is read once for each of these windows.
  static constexpr uint64_t window_bytes = uint64_t{32} << 20;
  // Files that are open at once, with what their headers say.
  static constexpr size_t most_open = 128;

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
