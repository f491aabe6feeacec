// SPDX-License-Identifier: Apache-2.0
#include "memory/prefetch_window.h"

#include <algorithm>
#include <utility>

namespace fsdp::memory {
namespace {

class Windows {
 public:
  Windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec, std::span<const uint32_t> resident_from)
      : visits_(visits), spec_(spec), resident_from_(resident_from), previous_(visits.size(), never) {
    std::vector<uint32_t> last(2 * spec.groups.size(), never);
    for (uint32_t i = 0; i < visits.size(); ++i) {
      const auto [group, phase] = visits[i];
      previous_[i] = std::exchange(last[2 * group + gather_slot(spec, group, phase)], i);
    }
  }

  // The positions that the visit at `position` gathers ahead. A resident group that is gathered already is skipped.
  std::vector<uint32_t> open(uint32_t position) const {
    std::vector<uint32_t> ahead;
    uint64_t left = spec_.prefetch_bytes == 0 ? UINT64_MAX : spec_.prefetch_bytes;  // saturates at 0
    uint32_t depth = spec_.prefetch_depth;
    for (uint32_t i = position + 1; i < visits_.size() && depth > 0; ++i) {
      if (resident_from_[visits_[i].group_index] < i) continue;
      --depth;
      // Named before inside the window: the nearer visit gathers it.
      if (previous_[i] != never && previous_[i] > position) continue;
      const uint64_t bytes = spec_.groups[visits_[i].group_index].prefetch_bytes;
      if (stays(i) || bytes <= left) ahead.push_back(i);
      // What does not fit is not overtaken by what lies further ahead.
      left -= std::min(left, bytes);
    }
    return ahead;
  }

  // Gathered since its visit before, which was so near that the buffer was kept: there is nothing to limit.
  bool stays(uint32_t i) const { return previous_[i] != never && i - previous_[i] <= spec_.prefetch_depth; }
  uint32_t previous(uint32_t i) const { return previous_[i]; }

 private:
  std::span<const fsdp_visit> visits_;
  const ScheduleSpec &spec_;
  std::span<const uint32_t> resident_from_;
  std::vector<uint32_t> previous_;  // the visit before this one that used the same buffer
};

}  // namespace

PrefetchWindow open_windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec,
                            std::span<const uint32_t> resident_from) {
  const Windows windows(visits, spec, resident_from);
  PrefetchWindow result;
  for (uint32_t i = 0; i < visits.size(); ++i) {
    result.begins.push_back(windows.stays(i) ? windows.previous(i) : i);
    result.ahead.push_back(windows.open(i));
  }
  for (uint32_t i = 0; i < visits.size(); ++i)
    for (uint32_t next : result.ahead[i]) result.begins[next] = std::min(result.begins[next], i);
  return result;
}

}  // namespace fsdp::memory
