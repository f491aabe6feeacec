// SPDX-License-Identifier: Apache-2.0
// The pages through which a rank sees a memory file: a mapping of its own, so that ranks that are threads cannot write
// what is not theirs either. Under ThreadSanitizer all of a process see a file at one address, and protections are not
// applied: races are found by address, and every rank at its own would hide those between ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"

namespace fsdp {

#if defined(__SANITIZE_THREAD__)
#define FSDP_ONE_VIEW 1
#elif defined(__has_feature)  // clang
#if __has_feature(thread_sanitizer)
#define FSDP_ONE_VIEW 1
#endif
#endif

#ifdef FSDP_ONE_VIEW
constexpr bool views_are_protected = false;
#else
constexpr bool views_are_protected = true;
#endif

// protection as of mmap. NULL, and errno, if there is none.
std::byte *map_view(const Fd &file, uint64_t bytes, int protection);
void unmap_view(std::byte *data, uint64_t bytes) noexcept;
// One whose pages are copied when they are written (private_view.h): under ThreadSanitizer too each has its own.
std::byte *map_private_view(const Fd &file, uint64_t bytes);
void unmap_private_view(std::byte *data, uint64_t bytes) noexcept;

}  // namespace fsdp
