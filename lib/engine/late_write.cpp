// SPDX-License-Identifier: Apache-2.0
// Debug mode: what writes into a gradient that was given back is found. Where memory can be protected it faults. Else
// the buffer is filled with 0xFF when it is free, and looked at when it is lent again and when the step ends.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "engine/reduce.h"

namespace fsdp::engine {
namespace {

constexpr unsigned char pattern = 0xFF;  // NaN in every dtype

bool is_untouched(device::Device &device, const std::byte *data, fsdp_dtype dtype, uint64_t count) {
  constexpr uint64_t piece_bytes = uint64_t{1} << 20;
  const uint64_t step = piece_bytes / dtype_size(dtype);
  std::vector<std::byte> piece(std::min(piece_bytes, count * dtype_size(dtype)));
  for (uint64_t first = 0; first < count; first += step) {
    const uint64_t now = std::min(step, count - first);
    device.transfer(piece.data(), dtype, data + first * dtype_size(dtype), dtype, now);
    const auto end = piece.begin() + static_cast<std::ptrdiff_t>(now * dtype_size(dtype));
    if (std::any_of(piece.begin(), end, [](std::byte byte) { return byte != std::byte{pattern}; })) return false;
  }
  return true;
}

}  // namespace

// Nothing is looked at in a capture, where no bytes are yet.
void Reducer::hide(GradPart &part, device::Stream &caller) {
  if (!runtime_.context.debug() || !part.group->plan->trainable) return;
  if (runtime_.storage->protects_grads()) return set_access(part, Access::none);
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    const Plane &full_grad = bucket.plane(PlaneKind::full_grad);
    caller.fill(full_grad.data, pattern, bucket.plan->layout.full_count * dtype_size(full_grad.dtype()));
  }
  caller.record(*part.hidden);
  part.is_hidden = runtime_.capture_id == 0;
}

bool Reducer::written_late(GradPart &part) {
  if (!part.is_hidden || runtime_.capture_id) return false;
  part.is_hidden = false;
  device::Device &device = runtime_.context.device();
  device.synchronize(*part.hidden);
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    const Plane &full_grad = bucket.plane(PlaneKind::full_grad);
    if (!is_untouched(device, full_grad.data, full_grad.dtype(), bucket.plan->layout.full_count)) return true;
  }
  return false;
}

// The step has all sums: what is in transient buffers is nobody's any more. Persistent ones may be the main grads.
void Reducer::hide_grads(device::Stream &caller) {
  for (GradPart &part : runtime_.parts)
    if (!part.group->plan->persistent_grad) hide(part, caller);
}

std::string Reducer::list_late_writes() {
  std::string text;
  for (GradPart &part : runtime_.parts)
    if (written_late(part)) text += format_text("{}{}", text.empty() ? "" : "; ", describe_late_write(part));
  return text;
}

std::string Reducer::describe_late_write(const GradPart &part) const {
  return format_text("a kernel wrote into the gradients of group '{}' after {}", part.name,
                     runtime_.spec.max_pending_bytes ? "fsdp_complete_grad or fsdp_reduce_grad" : "fsdp_reduce_grad");
}

void Reducer::forget_hidden() noexcept {
  for (GradPart &part : runtime_.parts) part.is_hidden = false;
}

}  // namespace fsdp::engine
