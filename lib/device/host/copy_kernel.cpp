// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "device/host/kernels.h"

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FSDP_REP_MOVSB 1
#include <cpuid.h>
#endif

namespace fsdp::device::kernels {

#ifdef FSDP_REP_MOVSB
namespace {

// From 64 KiB on the string instruction is the fastest copy of every size, where the processor says that it is fast
// at all: it needs no read of the lines that it overwrites, and unlike non-temporal stores leaves small ones cached.
constexpr size_t string_bytes = size_t{64} << 10;

bool has_fast_strings() {
  static const bool answer = [] {
    constexpr unsigned erms = 1u << 9;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & erms);
  }();
  return answer;
}

}  // namespace
#endif

void copy_bytes(void *to, const void *from, size_t bytes) {
  if (to == from || bytes == 0) return;
#ifdef FSDP_REP_MOVSB
  if (bytes >= string_bytes && has_fast_strings()) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace fsdp::device::kernels
