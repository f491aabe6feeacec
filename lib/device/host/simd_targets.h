// SPDX-License-Identifier: Apache-2.0
// Which of Highway's targets the kernels are compiled for; to be included before any of its headers. Left out are those
// that bring these kernels nothing over the next lower one.
#pragma once

#ifdef __FAST_MATH__
#error "the kernels promise exact bits: compile them without -ffast-math"
#endif

// Sanitizers look at addresses, which only the width of a vector decides: the shortest and the longest are enough. And
// at threads, which nothing here has.
#if defined(__SANITIZE_THREAD__) || defined(FSDP_NATIVE_KERNELS)
#define HWY_COMPILE_ONLY_STATIC
#elif defined(__SANITIZE_ADDRESS__)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX2 | HWY_AVX3_DL)
#elif !defined(HWY_DISABLED_TARGETS)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
