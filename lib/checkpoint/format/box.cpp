// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/format/box.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"

namespace fsdp::checkpoint {

namespace {

uint64_t product(std::span<const uint64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{1}, std::multiplies<>());
}

// Splits the elements [first, end) of the dimensions from `axis` on. The box already has its offset and shape in the
// earlier dimensions.
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

uint64_t common_count(const Box &a, const Box &b) {
  uint64_t count = 1;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    const uint64_t first = std::max(a.offset[d], b.offset[d]);
    const uint64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    if (first >= end) return 0;
    count *= end - first;
  }
  return count;
}

std::vector<Box> split_range(std::span<const uint64_t> shape, uint64_t first, uint64_t count) {
  std::vector<Box> boxes;
  split(shape, 0, first, first + count, whole(shape), boxes);
  return boxes;
}

RunWalk::RunWalk(const Box &common, const Box &from, const Box &to) {
  uint64_t from_step = 1, to_step = 1;
  bool joined = true;  // the run covers all dimensions after this one
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

WantedRuns::WantedRuns(const SafetensorsHeader &header, std::span<const std::vector<uint64_t>> offsets,
                       std::span<const WantedBox> wanted) {
  for (const WantedBox &box : wanted) {
    const StoredTensor &tensor = header.tensors[box.tensor];
    if (tensor.type->bits < 8)
      fail(FSDP_UNSUPPORTED, "tensor {} has elements of {} bits, which cannot be read", quote_json(tensor.name),
           tensor.type->bits);
    const Box stored{offsets[box.tensor], tensor.shape};
    walks_.push_back({RunWalk(box.box, stored, box.to), tensor.begin, tensor.type->bits / 8});
    bytes_ += box.box.count() * walks_.back().element;
  }
}

WantedRun WantedRuns::run(uint32_t wanted, uint64_t number) const {
  const Walk &walk = walks_[wanted];
  const CopyRun run = walk.runs[number];
  const uint64_t begin = walk.begin + run.from * walk.element;
  return {wanted, begin, begin + run.count * walk.element, run.to};
}

ByteRange WantedRuns::span() const {
  const auto last = static_cast<uint32_t>(walks_.size() - 1);
  return {run(0, 0).begin, run(last, walks_[last].runs.run_count() - 1).end};
}

std::vector<ByteRange> blocks_of(const WantedRuns &runs, uint64_t block, uint64_t data_bytes) {
  std::vector<ByteRange> ranges;
  runs.for_each([&](const WantedRun &run) {
    const ByteRange blocks{run.begin / block * block, std::min(round_up(run.end, block), data_bytes)};
    if (!ranges.empty() && blocks.begin <= ranges.back().end)
      ranges.back().end = std::max(ranges.back().end, blocks.end);
    else
      ranges.push_back(blocks);
  });
  return ranges;
}

namespace {

bool is_same_range(const Box &a, const Box &b, size_t axis) {
  return a.offset[axis] == b.offset[axis] && a.shape[axis] == b.shape[axis];
}

// The boxes are sorted by this axis.
std::optional<BoxPair> compare_all(std::span<const Box *> boxes, size_t axis, size_t &most) {
  for (size_t i = 0; i < boxes.size(); ++i) {
    const uint64_t end = boxes[i]->offset[axis] + boxes[i]->shape[axis];
    for (size_t j = i + 1; j < boxes.size() && boxes[j]->offset[axis] < end; ++j) {
      if (most-- == 0) return BoxPair{nullptr, nullptr};
      if (common_count(*boxes[i], *boxes[j])) return BoxPair{boxes[i], boxes[j]};
    }
  }
  return std::nullopt;
}

// All of these boxes share indices of the earlier axes. They are sorted, and divided into runs with connected ranges on
// this axis. If all ranges of a run are equal, the next axis divides the run. Otherwise each box is compared with those
// that begin inside it.
std::optional<BoxPair> find_overlap(std::span<const Box *> boxes, size_t axis, size_t &most) {
  if (boxes.size() < 2) return std::nullopt;
  if (axis == boxes[0]->offset.size()) return BoxPair{boxes[0], boxes[1]};
  std::ranges::stable_sort(boxes, {}, [axis](const Box *box) { return box->offset[axis]; });
  for (size_t begin = 0, end = 0; begin < boxes.size(); begin = end) {
    uint64_t reach = 0;
    bool equal = true;
    for (end = begin; end < boxes.size() && (end == begin || boxes[end]->offset[axis] < reach); ++end) {
      reach = std::max(reach, boxes[end]->offset[axis] + boxes[end]->shape[axis]);
      equal = equal && is_same_range(*boxes[begin], *boxes[end], axis);
    }
    if (const auto found = equal ? find_overlap(boxes.subspan(begin, end - begin), axis + 1, most)
                                 : compare_all(boxes.subspan(begin, end - begin), axis, most))
      return found;
  }
  return std::nullopt;
}

}  // namespace

std::optional<BoxPair> find_overlap(std::span<const Box *> boxes, size_t &most) {
  const auto end = std::partition(boxes.begin(), boxes.end(), [](const Box *box) { return box->count() > 0; });
  return find_overlap(boxes.first(static_cast<size_t>(end - boxes.begin())), 0, most);
}

namespace {

void check_boxes(const std::string &name, SpreadTensor &theirs) {
  constexpr size_t most_compared = size_t{1} << 26;  // pairs of boxes
  std::vector<const Box *> boxes;
  uint64_t count = 0;
  for (const auto &[file, box] : theirs.boxes) {
    boxes.push_back(box);
    count += box->count();
  }
  size_t most = most_compared;
  if (const auto found = find_overlap(boxes, most))
    fail(FSDP_INVALID_ARGUMENT, "tensor {} {}", quote_json(name),
         found->first ? "comes twice, in two files or more" : "is divided into too many boxes to compare them all");
  if (theirs.may_lack) return;
  uint64_t all = 1;
  for (const uint64_t size : theirs.shape) all = checked_multiply(all, size, name.c_str());
  if (count != all)
    fail(FSDP_INVALID_ARGUMENT, "tensor {} of shape [{}] is not whole: its files have {} of its elements",
         quote_json(name), fmt::join(theirs.shape, ", "), count);
}

}  // namespace

std::map<std::string, SpreadTensor> collect_tensors(std::span<const StoredFile> files) {
  std::map<std::string, SpreadTensor> all;
  for (uint32_t f = 0; f < files.size(); ++f)
    for (const StoredBox &one : files[f].boxes) {
      SpreadTensor &theirs = all[one.name];
      if (theirs.type && (theirs.type != one.type || theirs.unknown_type != one.unknown_type ||
                          theirs.shape.size() != one.box.shape.size()))
        fail(FSDP_INVALID_ARGUMENT, "tensor {} is not the same in all files that have it", quote_json(one.name));
      theirs.type = one.type, theirs.unknown_type = one.unknown_type;
      theirs.shape.resize(one.box.shape.size());
      for (size_t d = 0; d < theirs.shape.size(); ++d)
        theirs.shape[d] = std::max(theirs.shape[d], checked_add(one.box.offset[d], one.box.shape[d], one.name.c_str()));
      if (!one.shape.empty()) theirs.shape = one.shape, theirs.may_lack = true;
      theirs.boxes.emplace_back(f, &one.box);
    }
  for (auto &[name, theirs] : all) check_boxes(name, theirs);
  return all;
}

}  // namespace fsdp::checkpoint
