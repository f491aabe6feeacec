// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "device/host/copy_policy.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/copy_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

constexpr size_t line = 64, page = 4096;

template <bool streaming>
HWY_INLINE void copy_lines(std::byte *to, const std::byte *from, size_t lines) {
  const hn::CappedTag<uint8_t, line> d;
  for (size_t i = 0; i < lines * line; i += hn::Lanes(d)) {
    const auto bytes = hn::LoadU(d, reinterpret_cast<const uint8_t *>(from + i));
    store_lanes<streaming>(d, bytes, reinterpret_cast<uint8_t *>(to + i));
  }
}

// Copies several pages side by side, a few lines of each in turn. Prefetchers stop at the end of a page. With several
// pages at a time less time is lost at page starts, and the writes spread over the memory's banks.
template <size_t pages, bool streaming>
void copy_pages(std::byte *to, const std::byte *from, size_t bytes) {
  constexpr size_t lines = 4;
  size_t done = 0;
  for (; done + pages * page <= bytes; done += pages * page)
    for (size_t at = 0; at < page; at += lines * line)
      for (size_t p = 0; p < pages; ++p)
        copy_lines<streaming>(to + done + p * page + at, from + done + p * page + at, lines);
  if (streaming) hwy::FlushStream();
  std::memcpy(to + done, from + done, bytes - done);
}

void copy_beside(std::byte *to, const std::byte *from, size_t bytes) { copy_pages<4, false>(to, from, bytes); }
void copy_past_caches(std::byte *to, const std::byte *from, size_t bytes) {
  const size_t head = misaligned_head(to, bytes);
  std::memcpy(to, from, head);
  copy_pages<8, true>(to + head, from + head, bytes - head);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(copy_beside);
HWY_EXPORT(copy_past_caches);

void copy_bytes(void *to, const void *from, size_t bytes) {
  if (to == from || !bytes) return;
  const CopyChoice choice = choose_copy(bytes);
  if (!choice.trial) return copy_by(choice.way, to, from, bytes);
  const auto start = std::chrono::steady_clock::now();
  copy_by(choice.way, to, from, bytes);
  choice.trial->note(choice.way, bytes, std::chrono::steady_clock::now() - start);
}

void copy_by(CopyWay way, void *to, const void *from, size_t bytes) {
  auto *const target = static_cast<std::byte *>(to);
  const auto *const source = static_cast<const std::byte *>(from);
  switch (way) {
    case CopyWay::library: std::memcpy(to, from, bytes); return;
    case CopyWay::string: copy_string(to, from, bytes); return;
    case CopyWay::pages: HWY_DYNAMIC_DISPATCH(copy_beside)(target, source, bytes); return;
    case CopyWay::past_caches: HWY_DYNAMIC_DISPATCH(copy_past_caches)(target, source, bytes); return;
  }
}

}  // namespace fsdp::device::kernels
#endif
