// SPDX-License-Identifier: Apache-2.0
// Boxes: parts of a tensor whose sides run along its axes. All numbers count elements, in C order.
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

inline constexpr size_t max_dimensions = 16;  // the same as for fsdp_param
struct Box {
  std::vector<uint64_t> offset, shape;  // one number for each dimension; none for a scalar

  uint64_t count() const;
  bool operator==(const Box &) const = default;
};

// The box of a whole tensor.
Box whole(std::span<const uint64_t> shape);
// The intersection of two boxes; nothing if they do not overlap, or if one of them is empty.
std::optional<Box> intersect(const Box &a, const Box &b);
// The number of elements of the intersection, which is not made.
uint64_t common_count(const Box &a, const Box &b);
// Finds two boxes that overlap; nothing if they are disjoint. If a tensor is divided along one axis after the other,
// its boxes take no longer than a sort. Gives up after `most` comparisons of two boxes, and then returns {NULL, NULL}.
using BoxPair = std::pair<const Box *, const Box *>;
std::optional<BoxPair> find_overlap(std::span<const Box *> boxes, size_t &most);
// Divides the elements [first, first + count) of a tensor into as few boxes as possible, in order. The sizes of the
// tensor must not overflow.
std::vector<Box> split_range(std::span<const uint64_t> shape, uint64_t first, uint64_t count);

// A run of elements that are adjacent in both of two boxes. Each box is stored separately, in C order.
struct CopyRun {
  uint64_t from, to;  // position of the first element in each box
  uint64_t count;
};

// Walks the runs of the box `common`, as few as possible, in the order of its elements. The box must not be empty, and
// both other boxes must contain it.
class RunWalk {
 public:
  RunWalk(const Box &common, const Box &from, const Box &to);

  uint64_t run_count() const { return runs_; }
  CopyRun operator[](uint64_t number) const;

 private:
  struct Axis {
    uint64_t size;      // number of positions along this axis
    uint64_t from, to;  // distance in elements from one position to the next, in each box
  };
  std::array<Axis, max_dimensions> axes_;  // the axes that runs do not cross, the last axis first
  size_t axis_count_ = 0;
  uint64_t from_ = 0, to_ = 0, count_ = 1, runs_ = 1;
};

// A box of a tensor that the reader needs. The file must have all of the box.
struct WantedBox {
  uint32_t tensor;  // index in the file's header
  Box box;          // box in the whole tensor
  Box to;           // the box that is kept; it contains `box`
};
// One run of a box: its bytes are adjacent in the file, and in the box that is kept.
struct WantedRun {
  uint32_t wanted;      // number of the box
  uint64_t begin, end;  // byte range in the file's data
  uint64_t to;          // position of the first element in the box that is kept
};

struct ByteRange {
  uint64_t begin, end;

  bool operator==(const ByteRange &) const = default;
};

// The runs of boxes, in the order of the file. The boxes must be in the order of the header's tensors, and the boxes of
// one tensor in the order of its rows. Boxes must not have common rows.
class WantedRuns {
 public:
  // `offsets` has, for each of the file's tensors, its offset in the whole tensor.
  WantedRuns(const SafetensorsHeader &header, std::span<const std::vector<uint64_t>> offsets,
             std::span<const WantedBox> wanted);

  uint64_t bytes() const { return bytes_; }
  // The range from the first run's begin to the last run's end. There must be at least one run.
  ByteRange span() const;
  template <class Visit>
  void for_each(Visit visit) const {
    for (uint32_t w = 0; w < walks_.size(); ++w)
      for (uint64_t i = 0; i < walks_[w].runs.run_count(); ++i) visit(run(w, i));
  }

 private:
  struct Walk {
    RunWalk runs;
    uint64_t begin;    // where the tensor begins in the file's data
    uint32_t element;  // bytes per element
  };
  WantedRun run(uint32_t wanted, uint64_t number) const;

  std::vector<Walk> walks_;
  uint64_t bytes_ = 0;
};

// Finds the ranges of whole blocks that contain all runs, as few as possible; the last block ends with the data. Ranges
// of neighbouring runs that touch are joined.
std::vector<ByteRange> blocks_of(const WantedRuns &runs, uint64_t block, uint64_t data_bytes);

// A box of a tensor that is in one file. Each tensor in files of weights is one box or divided into several.
struct StoredBox {
  std::string name;
  const ElementType *type;
  Box box;
  std::vector<uint64_t> shape = {};  // shape of the tensor if its other boxes may be missing; empty: none are missing
  std::string unknown_type = {};     // the same as in StoredTensor
};
struct StoredFile {
  std::vector<StoredBox> boxes;
};

// A tensor that consists of one or more boxes.
struct SpreadTensor {
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<std::pair<uint32_t, const Box *>> boxes;  // each with the number of its file
  bool may_lack = false;                                // boxes of the tensor may be missing here
  std::string unknown_type = {};                        // the same as in StoredTensor

  std::string_view type_name() const { return is_known(*type) ? type->name : unknown_type; }
};

// Returns the tensors by name. Throws INVALID_ARGUMENT if boxes overlap, are not all of their tensor, or disagree about
// their tensor. `files` must live as long as the result.
std::map<std::string, SpreadTensor> collect_tensors(std::span<const StoredFile> files);
// The number of rows: a row is all dimensions but the first, and a scalar is one row.
inline uint64_t rows_of(std::span<const uint64_t> shape) { return shape.empty() ? 1 : shape[0]; }

}  // namespace fsdp::checkpoint
