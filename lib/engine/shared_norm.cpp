// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_norm.h"

#include "engine/gather_values.h"

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
