// SPDX-License-Identifier: Apache-2.0
// The sizes and last offsets of the public structs on 64-bit machines. They are append-only: a number here may grow with a
// release, and what stood before stays where it was (docs/contracts/abi-stability.md; tests/header has every offset).
#include <cstddef>

#include "fsdp.h"

static_assert(sizeof(fsdp_error) == 1056 && offsetof(fsdp_error, message) == 32);
static_assert(sizeof(fsdp_tensor) == 40 && offsetof(fsdp_tensor, dtype) == 36);
static_assert(sizeof(fsdp_context_options) == 128 && offsetof(fsdp_context_options, device_transport) == 124);
static_assert(sizeof(fsdp_mesh_options) == 32 && offsetof(fsdp_mesh_options, reduction_block_size) == 28);
static_assert(sizeof(fsdp_model_options) == 80 && offsetof(fsdp_model_options, reserved) == 76);
static_assert(sizeof(fsdp_visit) == 8);
static_assert(sizeof(fsdp_schedule_options) == 24);
static_assert(sizeof(fsdp_memory) == 104);
static_assert(sizeof(fsdp_stats) == 312 && offsetof(fsdp_stats, outer_sent_bytes) == 304);
static_assert(sizeof(fsdp_param) == 64 && offsetof(fsdp_param, user_data) == 56);
static_assert(sizeof(fsdp_group_options) == 24);
static_assert(sizeof(fsdp_chunk) == 40);
static_assert(sizeof(fsdp_shard) == 96 && offsetof(fsdp_shard, state_count) == 92);
static_assert(sizeof(fsdp_adamw_options) == 56);
static_assert(sizeof(fsdp_grad) == 24);
