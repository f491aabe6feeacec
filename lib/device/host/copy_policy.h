// SPDX-License-Identifier: Apache-2.0
// Chooses the fastest way to copy this many bytes on this processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::device::kernels {

enum class CopyWay : uint8_t {
  library,     // memcpy
  string,      // rep movsb
  pages,       // vectors on several pages side by side
  past_caches  // like `pages`, but written with non-temporal stores
};

CopyWay choose_copy(size_t bytes) noexcept;
void copy_by(CopyWay way, void *to, const void *from, size_t bytes);
// Copies with rep movsb, or with memcpy if there is no such instruction.
void copy_string(void *to, const void *from, size_t bytes) noexcept;

}  // namespace fsdp::device::kernels
