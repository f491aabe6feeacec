// SPDX-License-Identifier: Apache-2.0
#include "engine/model/debug_views.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "trace/file.h"

namespace fsdp::engine {
namespace {

// Replaces control characters, so that no name of a group breaks a line.
std::string printable(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](unsigned char byte) { return byte < 0x20 || byte == 0x7F; }, '?');
  return name;
}

}  // namespace

DebugViews::DebugViews(const Runtime &runtime, uint32_t model) noexcept : context_(runtime.context), model_(model) {
  if (context_.views_directory().empty()) return;
  try {
    path_ = format_text("{}/views-{}.txt", context_.views_directory(), ::getpid());
    find_ranges(runtime);
  } catch (const std::bad_alloc &) {
    ranges_.clear();
  }
  write(false);
}

DebugViews::~DebugViews() { write(true); }

void DebugViews::find_ranges(const Runtime &runtime) {
  const Storage &storage = *runtime.storage;
  for (const Group &group : runtime.groups) {
    const std::string name = printable(group.name());
    std::set<uint32_t> keys;
    if (group.plan->copies)
      for (const GatheredPiece &slot : group.slots) keys.insert(slot.key);
    for (const uint32_t key : keys)
      add({storage.own_part(memory::RegionId::gathered) + runtime.plan.gather_pool.offsets[key],
           runtime.plan.visits.gathered[key].bytes},
          "gathered", name);
    for (const memory::PiecePlan &piece : group.plan->pieces)
      if (!group.plan->copies && piece.compute.bytes)
        add(storage.shown_compute(piece), group.plan->gathers ? "weights" : "whole-weights", name);
    for (const GradPart &part : group.parts)
      if (part.plan->full_grad.bytes) add(storage.full_grad(*part.plan), "gradient", printable(part.name));
  }
}

void DebugViews::add(std::span<const std::byte> bytes, const char *kind, const std::string &group) {
  if (!bytes.empty()) ranges_.push_back({bytes, kind, group});
}

void DebugViews::write(bool ended) noexcept {
  if (ranges_.empty()) return;
  try {
    try {
      trace::append_to_file(path_, list(ended), ended ? "fsdp_destroy_model" : "fsdp_seal_model");
    } catch (const Error &error) {
      context_.log(FSDP_LOG_WARNING, format_text("rank {}: faults in views of model {} will not be explained: {}",
                                                 context_.rank(), model_, error.message));
    }
  } catch (...) {  // out of memory: the views are not listed
  }
}

std::string DebugViews::list(bool ended) const {
  std::string text;
  for (const auto &[bytes, kind, group] : ranges_) {
    const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
    text += format_text("{:x} {:x} {} {} {} {}\n", begin, begin + bytes.size(), ended ? "destroyed" : kind,
                        context_.rank(), model_, group);
  }
  return text;
}

}  // namespace fsdp::engine
