// SPDX-License-Identifier: Apache-2.0
// Ranges of the domain "libfsdp" for Nsight Systems and other tools that listen to NVTX. These functions do nothing
// without NVTX's header at build time, or without a tool at run time.
#pragma once

namespace fsdp::trace {

// Pushes the range "name object", or only the name if the object is NULL. The same thread must pop the range.
void push_range(const char *name, const char *object) noexcept;
void pop_range() noexcept;
bool has_ranges() noexcept;  // was the library built with NVTX?

}  // namespace fsdp::trace
