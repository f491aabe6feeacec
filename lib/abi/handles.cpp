// SPDX-License-Identifier: Apache-2.0
#include "abi/handles.h"

#include <iterator>

#include "base/error.h"

namespace fsdp::abi {

constinit ProcessHandles process_handles;

void refuse_handle(const void *handle, const char *call, const char *expected) {
  static constexpr const char *names[] = {nullptr,         "an fsdp_context", "an fsdp_mesh",      "an fsdp_model",
                                          "an fsdp_group", "an fsdp_capture", "an fsdp_checkpoint"};
  static_assert(std::size(names) == static_cast<size_t>(last_handle_kind) + 1);
  if (!handle) fail(FSDP_INVALID_HANDLE, "{}: the {} is NULL", call, expected);
  const uint64_t number = number_of(handle);
  const HandleKind kind = handle_table().kind_of(number);
  const char *found = handle_table().destroyed(number) ? "a destroyed handle"
                      : kind == HandleKind::none       ? "no handle of libfsdp"
                                                       : names[static_cast<size_t>(kind)];
  fail(FSDP_INVALID_HANDLE, "{}: the handle given as {} is {}", call, expected, found);
}

}  // namespace fsdp::abi
