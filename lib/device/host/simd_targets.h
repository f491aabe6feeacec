// SPDX-License-Identifier: Apache-2.0
// The targets of Highway for which the kernels are compiled. Must be included before any of Highway's headers. SSSE3
// and AVX3_DL are left out, because these kernels are no faster with them than with the next lower target. With Highway
// 1.0.3, AVX3_DL must be left out, because its TruncateTo gives wrong bytes; 1.0.4 also has this fault in AVX3_ZEN4.
// SVE is left out, because the kernels have structs of vectors, and vectors whose size is known only at run time cannot
// be members of structs.
#pragma once

#ifdef __FAST_MATH__
#error "the kernels promise exact bits: compile them without -ffast-math"
#endif

#define FSDP_SVE_TARGETS (HWY_SVE | HWY_SVE_256 | HWY_SVE2 | HWY_SVE2_128)

// Sanitizers check addresses, which depend only on the width of a vector, so the shortest and the longest vectors are
// enough. They also check threads, but the kernels start no threads.
#if defined(__SANITIZE_THREAD__) || defined(FSDP_NATIVE_KERNELS)
#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLED_TARGETS (FSDP_SVE_TARGETS | HWY_AVX3_DL)
#elif defined(__SANITIZE_ADDRESS__)
#define HWY_DISABLED_TARGETS (FSDP_SVE_TARGETS | HWY_SSSE3 | HWY_SSE4 | HWY_AVX2 | HWY_AVX3_DL)
#elif !defined(HWY_DISABLED_TARGETS)
#define HWY_DISABLED_TARGETS (FSDP_SVE_TARGETS | HWY_SSSE3 | HWY_AVX3_DL)
#endif
