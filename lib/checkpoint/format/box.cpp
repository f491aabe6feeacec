// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/box.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace fsdp::checkpoint {
namespace {

uint64_t product(std::span<const uint64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{1}, std::multiplies<>());
}

// Splits the elements [first, end) of the dimensions from `axis` on; the box has its place in those before.
void split(std::span<const uint64_t> shape, size_t axis, uint64_t first, uint64_t end, Box box,
           std::vector<Box> &boxes) {
  if (first == end) return;
  const uint64_t row = axis < shape.size() ? product(shape.subspan(axis + 1)) : 1;
  if (axis == shape.size() || (first % row == 0 && end % row == 0)) {  // whole rows
    if (axis < shape.size()) box.offset[axis] = first / row, box.shape[axis] = (end - first) / row;
    boxes.push_back(std::move(box));
    return;
  }
  const auto part = [&](uint64_t from, uint64_t to) {
    Box inner = box;
    inner.offset[axis] = from / row;
    inner.shape[axis] = 1;
    split(shape, axis + 1, from % row, from % row + (to - from), std::move(inner), boxes);
  };
  const uint64_t head_end = std::min(end, first % row ? (first / row + 1) * row : first);
  if (head_end > first) part(first, head_end);
  const uint64_t rows_end = std::max(head_end, end / row * row);
  split(shape, axis, head_end, rows_end, box, boxes);
  if (end > rows_end) part(rows_end, end);
}

}  // namespace

uint64_t Box::count() const { return product(shape); }

Box whole(std::span<const uint64_t> shape) {
  return {std::vector<uint64_t>(shape.size(), 0), {shape.begin(), shape.end()}};
}

std::optional<Box> intersect(const Box &a, const Box &b) {
  Box common = a;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    const uint64_t first = std::max(a.offset[d], b.offset[d]);
    const uint64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    if (first >= end) return std::nullopt;
    common.offset[d] = first;
    common.shape[d] = end - first;
  }
  return common;
}

std::vector<Box> split_range(std::span<const uint64_t> shape, uint64_t first, uint64_t count) {
  std::vector<Box> boxes;
  split(shape, 0, first, first + count, whole(shape), boxes);
  return boxes;
}

RunWalk::RunWalk(const Box &common, const Box &from, const Box &to) {
  uint64_t from_step = 1, to_step = 1;
  bool joined = true;  // the run goes through all dimensions behind this one
  for (size_t d = common.shape.size(); d-- > 0;) {
    const uint64_t size = common.shape[d];
    from_ += (common.offset[d] - from.offset[d]) * from_step;
    to_ += (common.offset[d] - to.offset[d]) * to_step;
    if (joined)
      count_ *= size;
    else if (size > 1)
      axes_[axis_count_++] = {size, from_step, to_step}, runs_ *= size;
    joined = joined && size == from.shape[d] && size == to.shape[d];
    from_step *= from.shape[d];
    to_step *= to.shape[d];
  }
}

CopyRun RunWalk::operator[](uint64_t number) const {
  CopyRun run{from_, to_, count_};
  for (size_t a = 0; a < axis_count_; ++a) {
    const Axis &axis = axes_[a];
    run.from += number % axis.size * axis.from;
    run.to += number % axis.size * axis.to;
    number /= axis.size;
  }
  return run;
}

}  // namespace fsdp::checkpoint
