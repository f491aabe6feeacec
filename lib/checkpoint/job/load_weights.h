// SPDX-License-Identifier: Apache-2.0
// All ranks of a model take its weights out of safetensors files, whoever wrote them: one file; a folder with several,
// with or without Hugging Face's index; the weights of a checkpoint, of PyTorch or of ours.
#pragma once

#include <span>
#include <string>

#include "checkpoint/job/load.h"
#include "checkpoint/plan/weight_plan.h"

namespace fsdp::checkpoint {

// Collective over the team. Of the options allow_missing, allow_unexpected and if_any count. Throws as load() does.
LoadResult load_weights(transport::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
                        std::span<const Rename> renames, const LoadOptions &options = {});

}  // namespace fsdp::checkpoint
