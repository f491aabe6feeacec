// SPDX-License-Identifier: Apache-2.0
// The floating-point modes of the calling thread: MXCSR without its sticky flags on x86-64, FPCR on aarch64.
// FSDP_HAS_FLOAT_MODES is defined where tests can set them.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cstdint>

#if defined(__x86_64__) || defined(__aarch64__)
#define FSDP_HAS_FLOAT_MODES

namespace float_modes {

#if defined(__x86_64__)
using Modes = uint32_t;
constexpr Modes standard = 0x1f80;
constexpr Modes flush_results = 0x8000, flush_inputs = 0x0040;
constexpr Modes round_down = 0x2000, round_up = 0x4000, round_to_zero = 0x6000;
inline Modes get() { return _mm_getcsr() & ~Modes{0x3f}; }
inline void set(Modes modes) { _mm_setcsr(modes); }
// The standard modes with a trap for each exception, as far as the processor has traps.
inline Modes with_all_traps() { return 0; }
#else
// One mode flushes both results and inputs.
using Modes = uint64_t;
constexpr Modes standard = 0;
constexpr Modes flush_results = Modes{1} << 24, flush_inputs = flush_results;
constexpr Modes round_down = Modes{2} << 22, round_up = Modes{1} << 22, round_to_zero = Modes{3} << 22;
inline Modes get() {
  Modes modes;
  asm volatile("mrs %0, fpcr" : "=r"(modes) : : "memory");
  return modes;
}
inline void set(Modes modes) { asm volatile("msr fpcr, %0" : : "r"(modes) : "memory"); }
// The standard modes with a trap for each exception, as far as the processor has traps.
inline Modes with_all_traps() {
  set(0x9f00);
  const Modes traps = get();
  set(standard);
  return traps;
}
#endif

constexpr Modes flush = flush_results | flush_inputs;

}  // namespace float_modes

#endif
