// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/shared_values.h"

#include <algorithm>

namespace fsdp::engine {

// Gathers first from the ranks of the inner axis of the model's mesh, and then from those of the outer axis if their
// values differ.
device::Stream &gather_values(Runtime &runtime, const ValuesGather &gather, device::Stream &caller) {
  const MeshComms &comms = runtime.model_comms();
  const CollectiveStream &reduces = comms.reducing;
  const layout::Mesh &mesh = comms.mesh;
  const uint64_t bytes = gather.bytes * mesh.inner_size, version = runtime.step.version();
  const bool over_outer = runtime.spec.value_slices() > 1;
  const uint32_t part = over_outer ? mesh.outer_index(comms.rank()) : 0;
  const transport::Gather near{gather.from, gather.whole + part * bytes, gather.bytes};
  caller.record(*runtime.marks.order);
  if (!runtime.marks.order->done()) reduces.stream->wait(*runtime.marks.order);
  if (comms.communicates) {
    reduces.trace->begin("all_gather", gather.of, bytes);
    comms.reduces->gather({&near, 1}, {no_group, gather.of.in_flight}, *reduces.stream);
    runtime.place_call({CallKind::values, 0});
    reduces.trace->end("all_gather", gather.of, bytes, version, *comms.reduces);
  } else {
    reduces.stream->copy(near.to, near.from.own, near.bytes);
  }
  if (!over_outer) return *reduces.stream;
  reduces.stream->record(gather.event);
  comms.outer->gather_values(gather.of, gather.whole, bytes, gather.event, version);
  return comms.outer->stream();
}

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

// Works on a limited number of parameters at a time, because scratch would otherwise grow as parameters times ranks.
// Nearly always all parameters are within the limit.
void SharedAmaxes::find_scales(device::Stream &caller) {
  const bool power_of_two = runtime_.spec.scale_rounding == FSDP_SCALE_POWER_OF_TWO;
  for (uint64_t first = 0; first < count_; first += memory::amax_chunk) {
    const uint64_t count = std::min(memory::amax_chunk, count_ - first);
    device::Stream &last = gather(first, count, caller);
    last.find_fp8_scales({all_, runtime_.spec.value_count(), count, power_of_two, scales_ + first, inverses_ + first});
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

namespace {

using memory::RegionId;

constexpr uint64_t norm_offset = 64;
static_assert(norm_offset + sizeof(device::Norm) <= memory::norm_head_bytes);

device::Norm *norm_at(std::byte *head) { return reinterpret_cast<device::Norm *>(head + norm_offset); }

}  // namespace

// Each region begins with this rank's share and the norm. In the device's region the shares of all ranks and the
// squares of the parameters follow. On the host, shares and squares are in the memory for all measured values.
SharedNorm::SharedNorm(Runtime &runtime) : runtime_(runtime) {
  std::byte *const host = runtime.storage->own_part(RegionId::norms);
  const Region &device = runtime.storage->region(RegionId::device_norms);
  std::byte *const head = device.data ? device.data : host;
  auto *const values = reinterpret_cast<double *>(head + memory::norm_head_bytes);
  squares_ = device.data ? values + runtime.spec.value_count() : values;
  shares_ = device.data ? values : values + runtime.plan.param_count;
  share_ = reinterpret_cast<double *>(head);
  norm_ = norm_at(head);
  copy_ = norm_at(host);
  own_ = device.part();
}

void SharedNorm::find(double max_norm, device::Stream &caller) {
  const memory::ModelSpec &spec = runtime_.spec;
  device::Stream &last = callers_tell() ? caller : gather(caller);
  // Shares are added in the order of slots or, if groups have several meshes, in the order of ranks.
  const uint32_t slices = spec.meshes.size() > 1 ? 1 : spec.value_slices();
  last.find_norm(norm_, {shares_, spec.value_count(), slices, spec.mesh().inner_size, max_norm});
  if (copy_ != norm_) last.copy(copy_, norm_, sizeof *copy_);
  last.record(*runtime_.marks.norm);
}

device::Stream &SharedNorm::gather(device::Stream &caller) {
  return gather_values(
      runtime_,
      {Traced("the gradient norm"), own_, reinterpret_cast<std::byte *>(shares_), sizeof(double), *runtime_.marks.norm},
      caller);
}

void SharedNorm::await(device::Stream &caller) { runtime_.wait(*runtime_.marks.norm, WaitKind::peers, caller); }

const device::Norm &SharedNorm::read() const {
  if (!runtime_.marks.norm->done()) {
    const WaitSpan span(runtime_, WaitKind::peers);
    runtime_.context.device().synchronize(*runtime_.marks.norm);
  }
  runtime_.context.failure().check();
  return *copy_;
}

}  // namespace fsdp::engine
