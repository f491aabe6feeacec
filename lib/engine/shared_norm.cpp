// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_norm.h"

namespace fsdp::engine {
namespace {

using memory::RegionId;

constexpr uint64_t norm_offset = 64;
static_assert(norm_offset + sizeof(device::Norm) <= memory::norm_head_bytes);

device::Norm *norm_at(std::byte *head) { return reinterpret_cast<device::Norm *>(head + norm_offset); }

}  // namespace

// A region begins with this rank's share and the norm. Then the device's has the shares of all and the squares of the
// parameters; on the host these lie where all that is measured does.
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
  const uint32_t neighbours = mesh.slices() > 1 ? mesh.outer_index(runtime.teams.all->rank()) * mesh.inner_size : 0;
  own_ = {{device.arena.get(), device.arena_offset, device.stride},
          reinterpret_cast<std::byte *>(shares_ + neighbours),
          sizeof(double)};
}

void SharedNorm::find(double max_norm, device::Stream &caller) {
  const layout::Mesh &mesh = runtime_.spec.mesh;
  device::Stream &last = callers_tell() ? caller : gather(caller);
  last.find_norm(norm_, {shares_, mesh.slots(), mesh.slices(), mesh.inner_size, max_norm});
  if (copy_ != norm_) last.copy(copy_, norm_, sizeof *copy_);
  last.record(*runtime_.marks.norm);
}

// Of the ranks of the inner axis first, then of those of the outer one where it divides slots.
device::Stream &SharedNorm::gather(device::Stream &caller) {
  CollectiveStream &reduces = runtime_.reduces;
  const layout::Mesh &mesh = runtime_.spec.mesh;
  const uint64_t bytes = own_.bytes * mesh.inner_size, version = runtime_.step.version();
  caller.record(*runtime_.marks.order);
  if (!runtime_.marks.order->done()) reduces.stream->wait(*runtime_.marks.order);
  if (runtime_.communicates()) {
    const Traced norm("the gradient norm");
    reduces.trace->begin("all_gather", norm, bytes);
    reduces.comm->all_gather({&own_, 1}, {norm_tag, norm.in_flight}, *reduces.stream);
    reduces.trace->end("all_gather", norm, bytes, version, *reduces.comm);
  } else {
    reduces.stream->copy(own_.to, share_, own_.bytes);
  }
  if (mesh.slices() == 1) return *reduces.stream;
  reduces.stream->record(*runtime_.marks.norm);
  runtime_.outer->gather_norm(reinterpret_cast<std::byte *>(shares_), bytes, *runtime_.marks.norm, version);
  return runtime_.outer->stream();
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
