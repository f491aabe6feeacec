// SPDX-License-Identifier: Apache-2.0
// Parts of a tensor whose sides run along its axes. All numbers count elements; C order.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/format/element_type.h"
#include "checkpoint/format/safetensors.h"

namespace fsdp::checkpoint {

inline constexpr size_t max_dimensions = 16;  // as fsdp_param

struct Box {
  std::vector<uint64_t> offset, shape;  // a number for each dimension; a scalar has none

  uint64_t count() const;
  bool operator==(const Box &) const = default;
};

// A whole tensor.
Box whole(std::span<const uint64_t> shape);
// What both have; nothing where they do not meet, or where one of them is empty.
std::optional<Box> intersect(const Box &a, const Box &b);
// The elements [first, first + count) of a tensor as the fewest boxes, in their order. Its sizes must not overflow.
std::vector<Box> split_range(std::span<const uint64_t> shape, uint64_t first, uint64_t count);

// Elements that lie next to each other in both of two boxes, each of which is kept by itself in C order.
struct CopyRun {
  uint64_t from, to;  // the first element's place in either box
  uint64_t count;
};

// The runs of `common` in the order of its elements: the fewest there are. Both boxes contain it, and it is not empty.
class RunWalk {
 public:
  RunWalk(const Box &common, const Box &from, const Box &to);

  uint64_t run_count() const { return runs_; }
  CopyRun operator[](uint64_t number) const;

 private:
  struct Axis {
    uint64_t size;      // of the numbers that a run may have here
    uint64_t from, to;  // elements from one to the next
  };
  std::array<Axis, max_dimensions> axes_;  // those that runs do not cross, the last one first
  size_t axis_count_ = 0;
  uint64_t from_ = 0, to_ = 0, count_ = 1, runs_ = 1;
};

// Which bytes of a file are read so that boxes of its tensors can be taken out of it.

// A box that the reader needs of a tensor, all of which the file has.
struct WantedBox {
  uint32_t tensor;  // in the file's header
  Box box;          // in the whole tensor
  Box to;           // where it is kept: a box that contains it
};

// Bytes of a file's data, those of one run of a box: they lie next to each other in the file and where they are kept.
struct WantedRun {
  uint32_t wanted;      // number of the box
  uint64_t begin, end;  // in the file's data
  uint64_t to;          // element, in the box where it is kept
};

struct ByteRange {
  uint64_t begin, end;

  bool operator==(const ByteRange &) const = default;
};

// The runs of boxes, in the order of the file: the boxes are given in the order of the header's tensors, and those of
// one tensor in the order of its rows, without common ones.
class WantedRuns {
 public:
  // `offsets`: where each of the file's tensors lies in the whole one.
  WantedRuns(const SafetensorsHeader &header, std::span<const std::vector<uint64_t>> offsets,
             std::span<const WantedBox> wanted);

  uint64_t bytes() const { return bytes_; }
  // From the first byte of the first run to the last one of the last: there is one at least.
  ByteRange span() const;
  template <class Visit>
  void for_each(Visit visit) const {
    for (uint32_t w = 0; w < walks_.size(); ++w)
      for (uint64_t i = 0; i < walks_[w].runs.run_count(); ++i) visit(run(w, i));
  }

 private:
  struct Walk {
    RunWalk runs;
    uint64_t begin;    // of the tensor, in the file's data
    uint32_t element;  // bytes
  };
  WantedRun run(uint32_t wanted, uint64_t number) const;

  std::vector<Walk> walks_;
  uint64_t bytes_ = 0;
};

// The fewest ranges of whole blocks that contain all runs; the last block ends with the data. Those of one run and the
// next are one where they touch.
std::vector<ByteRange> blocks_of(const WantedRuns &runs, uint64_t block, uint64_t data_bytes);

// Tensors that are in files of weights, each of them in one box or cut into several.

// What is in one file: boxes of tensors.
struct StoredBox {
  std::string name;
  const ElementType *type;
  Box box;
  std::vector<uint64_t> shape = {};  // of the tensor, whose other boxes may not be there; empty: all of them are
  std::string unknown_type = {};     // as in StoredTensor
};
struct StoredFile {
  std::vector<StoredBox> boxes;
};

// A tensor, in however many boxes.
struct SpreadTensor {
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<std::pair<uint32_t, const Box *>> boxes;  // in which file
  bool may_lack = false;                                // boxes of it, which others have
  std::string unknown_type = {};                        // as in StoredTensor

  std::string_view type_name() const { return is_known(*type) ? type->name : unknown_type; }
};

// By name. Refuses boxes that overlap, that are not all of their tensor or that differ in what they are of:
// INVALID_ARGUMENT. The files live as long as what is returned.
std::map<std::string, SpreadTensor> collect_tensors(std::span<const StoredFile> files);

// All dimensions but the first are a row; a scalar is one.
inline uint64_t rows_of(std::span<const uint64_t> shape) { return shape.empty() ? 1 : shape[0]; }

}  // namespace fsdp::checkpoint
