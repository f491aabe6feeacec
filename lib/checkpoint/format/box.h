// SPDX-License-Identifier: Apache-2.0
// Parts of a tensor whose sides run along its axes. All numbers count elements; C order.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace fsdp::checkpoint {

inline constexpr size_t most_dimensions = 16;  // as fsdp_param

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
  std::array<Axis, most_dimensions> axes_;  // those that runs do not cross, the last one first
  size_t axis_count_ = 0;
  uint64_t from_ = 0, to_ = 0, count_ = 1, runs_ = 1;
};

}  // namespace fsdp::checkpoint
