// SPDX-License-Identifier: Apache-2.0
// Callers that do not wait for peers: whether full gradient buffers can be lent now, before anything is changed for it.
#include <algorithm>
#include <utility>

#include "engine/reduce.h"

namespace fsdp::engine {

// Would drain() go on at once?
bool Reducer::is_drained(const GradPart &part) const {
  if (!runtime_.communicates() || !runtime_.collectives().releases_tickets) return part.reduced->done();
  const transport::Collectives &comm = *runtime_.reduces.comm;
  return comm.released(part.ticket) && (!comm.broken() || part.reduced->done());
}

// One after the other, as acquire() would open them and make_room() make room for each. A GPU waits itself.
void Reducer::check_drained(Group &group, uint64_t first, uint64_t end, const device::Stream &caller,
                            const char *call) {
  if (!caller.is_calling_thread() || group.plan->persistent_grad) return;
  if (end == first + 1) check_room({&group.part_of(first), 1}, call);
  std::ranges::fill(would_, Would());
  uint32_t live = pool_.live;
  const auto drain = [&](const GradPart &reduced, const GradPart &part) {
    if (reduced.stage != GradStage::reducing || std::exchange(would_[reduced.number].drain, true)) return;
    if (!is_drained(reduced)) refuse_wait(part, reduced, call);
    --live;
  };
  for (uint64_t i = first; i < end; ++i) {
    if (!runtime_.param(group, i).has_gradient()) continue;
    const GradPart &part = group.part_of(i);
    if (part.stage == GradStage::lent || std::exchange(would_[part.number].open, true)) continue;
    drain(part, part);
    for (auto oldest = pool_.reducing.begin(); live >= most_live_ && oldest != pool_.reducing.end(); ++oldest)
      drain(runtime_.parts[*oldest], part);
    for (const uint32_t number : part.overlaps) drain(runtime_.parts[number], part);
    ++live;
  }
}

void Reducer::refuse_wait(const GradPart &part, const GradPart &reduced, const char *call) const {
  fail(FSDP_BUSY,
       "{}: group '{}' needs a full gradient buffer, and peers have not read that of group '{}' yet; try again "
       "later, or without FSDP_GRAD_NO_WAIT to wait for them",
       call, part.name, reduced.name);
}

}  // namespace fsdp::engine
