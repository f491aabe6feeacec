// SPDX-License-Identifier: Apache-2.0
// Compiles the library's kernels for the simulated runtime.
#include "simulated_cuda/shim.h"
// The shim must be included first.
#include "device/cuda/adamw_kernel.cu"
#include "device/cuda/compact_adamw_kernel.cu"
#include "device/cuda/count_kernels.cu"
#include "device/cuda/element_kernels.cu"
#include "device/cuda/float8_kernels.cu"
#include "device/cuda/fp8_kernels.cu"
#include "device/cuda/mxfp8_kernels.cu"
#include "device/cuda/norm_kernel.cu"
#include "device/cuda/rank_sum_kernel.cu"
