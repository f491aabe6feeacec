// SPDX-License-Identifier: Apache-2.0
// Which of Highway's targets the kernels are compiled for; to be included before any of its headers. Left out are those
// that bring these kernels nothing over the next lower one.
#pragma once

#ifdef __FAST_MATH__
#error "the kernels promise exact bits: compile them without -ffast-math"
#endif

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
