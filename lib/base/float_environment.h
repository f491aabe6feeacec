// SPDX-License-Identifier: Apache-2.0
// Sets the IEEE default as long as the object exists: round to nearest even, subnormals kept, no traps. Callers may
// have set flush-to-zero or another rounding mode, which must not change any computed bit. The destructor restores the
// caller's mode.
#pragma once

#if defined(__x86_64__) || defined(__SSE__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#else
#include <cfenv>
#endif

namespace fsdp {

#if defined(__x86_64__) || defined(__SSE__)

// Writing MXCSR costs far more than reading it, so it is written only if the caller's mode differs.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept : saved_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(standard);
  }
  ~FloatEnvironment() {
    if (differs()) _mm_setcsr(saved_);
  }
  FloatEnvironment(const FloatEnvironment &) = delete;
  FloatEnvironment &operator=(const FloatEnvironment &) = delete;

 private:
  static constexpr unsigned standard = 0x1f80;      // all exceptions masked, nearest even, no FTZ, no DAZ
  static constexpr unsigned sticky_flags = 0x003f;  // exceptions that have occurred; they are not part of the mode
  bool differs() const noexcept { return (saved_ & ~sticky_flags) != standard; }
  unsigned saved_;
};

#elif defined(__aarch64__)

// Exceptions that have occurred are in FPSR. This class does not write FPSR, as fesetenv() would. FPCR has only modes,
// and 0 is the standard one, also for bits of later processors.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept : saved_(read()) {
    if (saved_ != 0) write(0);
  }
  ~FloatEnvironment() {
    if (saved_ != 0) write(saved_);
  }
  FloatEnvironment(const FloatEnvironment &) = delete;
  FloatEnvironment &operator=(const FloatEnvironment &) = delete;

 private:
  static uint64_t read() noexcept {
    uint64_t modes;
    asm volatile("mrs %0, fpcr" : "=r"(modes) : : "memory");
    return modes;
  }
  static void write(uint64_t modes) noexcept { asm volatile("msr fpcr, %0" : : "r"(modes) : "memory"); }
  uint64_t saved_;
};

#else

class FloatEnvironment {
 public:
  FloatEnvironment() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
  FloatEnvironment(const FloatEnvironment &) = delete;
  FloatEnvironment &operator=(const FloatEnvironment &) = delete;

 private:
  std::fenv_t saved_;
};

#endif

}  // namespace fsdp
