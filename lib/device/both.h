// SPDX-License-Identifier: Apache-2.0
// What definitions that the host and the GPUs share are declared with: functions for either under nvcc, plain ones
// elsewhere.
#pragma once

#if defined(__CUDACC__)
#define FSDP_BOTH __host__ __device__ __forceinline__
#else
#define FSDP_BOTH inline
#endif
