// SPDX-License-Identifier: Apache-2.0
// What a program wrote into views of weights, which it must not, is taken back: docs/contracts/memory.md.
#include "engine/gather.h"

namespace fsdp::engine {

const std::byte *Gatherer::source(Group &group, fsdp_phase phase, uint32_t index, PlaneKind published,
                                  uint32_t form) const {
  if (group.plan->copies) return view(group, phase, index, published, form);
  return runtime_.storage->buckets()[index].plane(published, form).view;
}

void Gatherer::restore(Group &group) {
  if (group.plan->copies) return drop(group);
  if (runtime_.storage->restores(*group.plan)) return runtime_.storage->restore(*group.plan);
  const bool shared = group.plan->compute.region != memory::RegionId::local_compute;
  fail(FSDP_INVALID_STATE,
       "fsdp_restore_view: group '{}': the model was created with view_kind FSDP_VIEWS_READ_ONLY, and its weights are "
       "not "
       "copied: {}; FSDP_VIEWS_PRIVATE, on the host device, has views that can be restored",
       group.name(),
       shared ? "a write into its views is a fault, so there is nothing to take back"
              : "its views are the weights themselves, so what was written there cannot be taken back");
}

}  // namespace fsdp::engine
