// SPDX-License-Identifier: Apache-2.0
// FSDP_BOTH declares functions that the host and the GPUs share. Under nvcc they are compiled for both; other compilers
// see plain functions.
#pragma once

#if defined(__CUDACC__)
#define FSDP_BOTH __host__ __device__ __forceinline__
#else
#define FSDP_BOTH inline
#endif
