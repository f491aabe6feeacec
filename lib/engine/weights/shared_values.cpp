// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/shared_values.h"

#include <algorithm>

namespace fsdp::engine {

// Gathers first from the ranks of the inner axis, and then from those of the outer axis if that divides slots.
device::Stream &gather_values(Runtime &runtime, const ValuesGather &gather, device::Stream &caller) {
  CollectiveStream &reduces = runtime.reduces;
  const layout::Mesh &mesh = runtime.spec.mesh;
  const uint64_t bytes = gather.bytes * mesh.inner_size, version = runtime.step.version();
  const uint32_t part = mesh.slices() > 1 ? mesh.outer_index(runtime.teams.all->rank()) : 0;
  const transport::Gather near{gather.from, gather.whole + part * bytes, gather.bytes};
  caller.record(*runtime.marks.order);
  if (!runtime.marks.order->done()) reduces.stream->wait(*runtime.marks.order);
  if (runtime.communicates()) {
    reduces.trace->begin("all_gather", gather.of, bytes);
    reduces.comm->gather({&near, 1}, {no_group, gather.of.in_flight}, *reduces.stream);
    reduces.trace->end("all_gather", gather.of, bytes, version, *reduces.comm);
  } else {
    reduces.stream->copy(near.to, near.from.own, near.bytes);
  }
  if (mesh.slices() == 1) return *reduces.stream;
  reduces.stream->record(gather.event);
  runtime.outer->gather_values(gather.of, gather.whole, bytes, gather.event, version);
  return runtime.outer->stream();
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

// Works on a limited number of parameters at a time, so that scratch does not grow as parameters times ranks. Nearly
// always this number is all of them.
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

namespace {

using memory::RegionId;

constexpr uint64_t norm_offset = 64;
static_assert(norm_offset + sizeof(device::Norm) <= memory::norm_head_bytes);

device::Norm *norm_at(std::byte *head) { return reinterpret_cast<device::Norm *>(head + norm_offset); }

}  // namespace

// Each region begins with this rank's share and the norm. In the device's region the shares of all ranks and the
// squares of the parameters follow. On the host these are where all measured values are.
SharedNorm::SharedNorm(Runtime &runtime) : runtime_(runtime) {
  const layout::Mesh &mesh = runtime.spec.mesh;
  std::byte *const host = runtime.storage->own_part(RegionId::norms);
  const Region &device = runtime.storage->region(RegionId::device_norms);
  std::byte *const head = device.data ? device.data : host;
  auto *const values = reinterpret_cast<double *>(head + memory::norm_head_bytes);
  squares_ = device.data ? values + mesh.slots() : values;
  shares_ = device.data ? values : values + runtime.plan.param_count;
  share_ = reinterpret_cast<double *>(head);
  norm_ = norm_at(head);
  copy_ = norm_at(host);
  own_ = device.part();
}

void SharedNorm::find(double max_norm, device::Stream &caller) {
  const layout::Mesh &mesh = runtime_.spec.mesh;
  device::Stream &last = callers_tell() ? caller : gather(caller);
  last.find_norm(norm_, {shares_, mesh.slots(), mesh.slices(), mesh.inner_size, max_norm});
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
