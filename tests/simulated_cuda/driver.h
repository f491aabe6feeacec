// SPDX-License-Identifier: Apache-2.0
// Declares the driver's functions for contexts and virtual memory, which the table in driver_calls.cpp contains. The
// names follow this library's style, because the real names are macros and belong to -lcuda.
#pragma once

#include <cuda.h>

namespace simulated {

CUresult CUDAAPI primary_context_retain(CUcontext *context, CUdevice index);
CUresult CUDAAPI primary_context_release(CUdevice index);
CUresult CUDAAPI context_get_current(CUcontext *context);
CUresult CUDAAPI context_set_current(CUcontext context);
CUresult CUDAAPI context_push(CUcontext context);
CUresult CUDAAPI context_pop(CUcontext *context);

CUresult CUDAAPI memory_create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                               unsigned long long flags);
CUresult CUDAAPI memory_release(CUmemGenericAllocationHandle handle);
CUresult CUDAAPI retain_handle(CUmemGenericAllocationHandle *handle, void *pointer);
CUresult CUDAAPI address_reserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wanted,
                                 unsigned long long flags);
CUresult CUDAAPI address_free(CUdeviceptr pointer, size_t size);
CUresult CUDAAPI memory_map(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags);
CUresult CUDAAPI memory_unmap(CUdeviceptr pointer, size_t size);
CUresult CUDAAPI memory_set_access(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *descriptions, size_t count);
CUresult CUDAAPI memory_get_access(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer);
CUresult CUDAAPI allocation_granularity(size_t *granularity, const CUmemAllocationProp *properties,
                                        CUmemAllocationGranularity_flags option);
CUresult CUDAAPI export_handle(void *handle_out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                               unsigned long long flags);
CUresult CUDAAPI import_handle(CUmemGenericAllocationHandle *handle, void *handle_in, CUmemAllocationHandleType type);

}  // namespace simulated
