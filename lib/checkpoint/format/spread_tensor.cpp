// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/spread_tensor.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "base/json.h"

namespace fsdp::checkpoint {
namespace {

// Sorted by their first row, boxes that may overlap are near each other.
void check_boxes(const std::string &name, SpreadTensor &theirs) {
  const auto first = [](const auto &one) { return one.second->offset.empty() ? 0 : one.second->offset[0]; };
  std::ranges::stable_sort(theirs.boxes, {}, first);
  uint64_t count = 0;
  for (size_t i = 0; i < theirs.boxes.size(); ++i) {
    const Box &box = *theirs.boxes[i].second;
    count += box.count();
    const uint64_t end = box.offset.empty() ? 1 : box.offset[0] + box.shape[0];
    for (size_t j = i + 1; j < theirs.boxes.size() && first(theirs.boxes[j]) < end; ++j)
      if (intersect(box, *theirs.boxes[j].second))
        fail(FSDP_INVALID_ARGUMENT, "tensor {} comes twice, in two files or more", quote_json(name));
  }
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
