// SPDX-License-Identifier: Apache-2.0
// Checks at the C boundary for every call: handles, the fields of structs, and the promised layout of the structs.
#include "abi/boundary.h"

#include <cstddef>
#include <iterator>

#include "abi/options.h"
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

std::string Field::text() const {
  if (!array_) return name_;
  std::string text = format_text("{}[{}]", array_, index_);
  if (element_) text += format_text(" ('{}')", *element_);
  if (name_) text += format_text(".{}", name_);
  return text;
}

// The sizes and last offsets of the public structs on 64-bit machines. Structs are append-only: a number here may grow
// with a release, but earlier fields keep their offsets (docs/contracts/abi-stability.md; tests/header has all
// offsets).
static_assert(sizeof(fsdp_error) == 1056 && offsetof(fsdp_error, message) == 32);
static_assert(sizeof(fsdp_tensor) == 56 && offsetof(fsdp_tensor, device_index) == 52);
static_assert(sizeof(fsdp_context_options) == 144 && offsetof(fsdp_context_options, debug_failed_allocation) == 136);
static_assert(sizeof(fsdp_mesh_options) == 32 && offsetof(fsdp_mesh_options, reduction_block_size) == 28);
static_assert(sizeof(fsdp_model_options) == 168 && offsetof(fsdp_model_options, matrix_bytes) == 128);
static_assert(sizeof(fsdp_visit) == 12 && offsetof(fsdp_visit, piece) == 8);
static_assert(sizeof(fsdp_schedule_options) == 40 && offsetof(fsdp_schedule_options, reserved) == 36);
static_assert(sizeof(fsdp_model_info) == 80 && offsetof(fsdp_model_info, layout_hash) == 72);
static_assert(sizeof(fsdp_stats) == 280 && offsetof(fsdp_stats, gathered_column_bytes) == 248);
static_assert(sizeof(fsdp_param) == 120 && offsetof(fsdp_param, row_dimensions) == 88 &&
              offsetof(fsdp_param, matrix_split_count) == 112);
static_assert(sizeof(fsdp_group_options) == 56 && offsetof(fsdp_group_options, grad_factor) == 48);
static_assert(sizeof(fsdp_group_info) == 88 && offsetof(fsdp_group_info, grad_factor) == 80);
static_assert(sizeof(fsdp_chunk) == 40 && offsetof(fsdp_chunk, row_count) == 32);
static_assert(sizeof(fsdp_shard) == 104 && offsetof(fsdp_shard, state_count) == 100);
static_assert(sizeof(fsdp_matrix) == 104 && offsetof(fsdp_matrix, reserved) == 100);
static_assert(sizeof(fsdp_matrix_options) == 32 && offsetof(fsdp_matrix_options, reserved) == 28);
static_assert(sizeof(fsdp_adamw_options) == 56 && offsetof(fsdp_adamw_options, reserved) == 52);
static_assert(sizeof(fsdp_checkpoint_status) == 80 && offsetof(fsdp_checkpoint_status, name) == 48);
static_assert(sizeof(fsdp_grad) == 24 && offsetof(fsdp_grad, reserved) == 20);

}  // namespace fsdp::abi
