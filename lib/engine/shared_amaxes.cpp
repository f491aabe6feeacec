// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_amaxes.h"

#include <algorithm>

#include "engine/gather_values.h"

namespace fsdp::engine {
namespace {

constexpr const char *what = "the amaxes of parameters";

}  // namespace

SharedAmaxes::SharedAmaxes(Runtime &runtime)
    : runtime_(runtime),
      count_(runtime.plan.amax_count),
      own_(reinterpret_cast<float *>(runtime.storage->own_part(memory::RegionId::amaxes))),
      all_(own_ + 3 * count_),
      scales_(own_ + count_),
      inverses_(own_ + 2 * count_) {}

// So many at a time that scratch does not grow as parameters times ranks: nearly always all of them.
void SharedAmaxes::find_scales(device::Stream &caller) {
  const bool power_of_two = runtime_.spec.scale_rounding == FSDP_SCALE_POWER_OF_TWO;
  for (uint64_t first = 0; first < count_; first += memory::amax_chunk) {
    const uint64_t count = std::min(memory::amax_chunk, count_ - first);
    device::Stream &last = gather(first, count, caller);
    last.find_fp8_scales({all_, runtime_.spec.mesh.slots(), count, power_of_two, scales_ + first, inverses_ + first});
    if (&last == &caller) continue;
    last.record(*runtime_.marks.amaxes);
    runtime_.wait(*runtime_.marks.amaxes, WaitKind::peers, caller);
  }
}

device::Stream &SharedAmaxes::gather(uint64_t first, uint64_t count, device::Stream &caller) {
  const uint64_t bytes = count * sizeof(float);
  const Region &region = runtime_.storage->region(memory::RegionId::amaxes);
  if (region.arena)
    return gather_values(runtime_,
                         {Traced(what), region.part().at(first * sizeof(float)), reinterpret_cast<std::byte *>(all_),
                          bytes, *runtime_.marks.amaxes},
                         caller);
  const WaitSpan span(runtime_, WaitKind::peers);
  const trace::FlightScope flight(*runtime_.flights.meetings, what, bytes);
  runtime_.holders().all_gather(own_ + first, bytes, all_, what);
  return caller;
}

}  // namespace fsdp::engine
