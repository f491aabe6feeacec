// SPDX-License-Identifier: Apache-2.0
// Which weights of files that others wrote go where in a model: by name, or as renames say. Pure, and the same on every
// rank but for the rows that are its own.
#pragma once

#include <span>

#include "checkpoint/format/spread_tensor.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/rename.h"

namespace fsdp::checkpoint {

// Files are numbered as they are given. Of missing rows of a tensor the plan's `other` tells, of tensors `missing`.
LoadPlan plan_weights(const ModelShards &shards, std::span<const StoredFile> files, std::span<const Rename> renames,
                      uint32_t rank);

}  // namespace fsdp::checkpoint
