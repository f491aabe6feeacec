// SPDX-License-Identifier: Apache-2.0
// The words that stand for the ABI's enums, on the command line and in model files.
#pragma once

#include <map>
#include <string>

#include "fsdp.h"

namespace plan {

using Names = std::map<std::string, int32_t>;

inline const Names strategies{{"no_shard", FSDP_STRATEGY_NO_SHARD},
                              {"optim", FSDP_STRATEGY_OPTIM},
                              {"optim_grads", FSDP_STRATEGY_OPTIM_GRADS},
                              {"optim_grads_params", FSDP_STRATEGY_OPTIM_GRADS_PARAMS}};
inline const Names dtypes{{"fp32", FSDP_FLOAT32}, {"bf16", FSDP_BFLOAT16}, {"fp16", FSDP_FLOAT16}};
inline const Names param_dtypes{
    {"fp32", FSDP_FLOAT32}, {"bf16", FSDP_BFLOAT16}, {"fp16", FSDP_FLOAT16}, {"uint8", FSDP_UINT8}};
inline const Names granules{{"row", FSDP_GRANULE_ROW}, {"block", FSDP_GRANULE_BLOCK}, {"tensor", FSDP_GRANULE_TENSOR}};
inline const Names quantizations{
    {"none", 0}, {"fp8", FSDP_QUANTIZE_FP8}, {"mxfp8", FSDP_QUANTIZE_MXFP8}, {"fp8_block", FSDP_QUANTIZE_FP8_BLOCK}};
inline const Names unshard_modes{{"mapped", FSDP_UNSHARD_MAPPED}, {"copied", FSDP_UNSHARD_COPIED}};
inline const Names reduce_policies{{"each", FSDP_REDUCE_POLICY_EACH}, {"last", FSDP_REDUCE_POLICY_LAST}};
inline const Names optimizers{{"adamw", FSDP_OPTIMIZER_ADAMW}, {"none", FSDP_OPTIMIZER_CALLER}};
inline const Names param_optimizers{{"adamw", FSDP_OPTIMIZER_ADAMW}, {"caller", FSDP_OPTIMIZER_CALLER}};
inline const Names states{{"fp32", FSDP_OPTIMIZER_ADAMW}, {"8bit", FSDP_OPTIMIZER_ADAMW_8BIT}};
inline const Names main_storages{{"fp32", FSDP_MAIN_FLOAT32}, {"split16", FSDP_MAIN_SPLIT16}, {"none", FSDP_MAIN_NONE}};
inline const Names homes{{"memory", FSDP_HOME_DEVICE}, {"file", FSDP_HOME_FILE}};
inline const Names outer_strategies{{"no_shard", FSDP_OUTER_NO_SHARD}, {"optim", FSDP_OUTER_OPTIM}};
inline const Names backward_weights{{"gathered", FSDP_BACKWARD_WEIGHTS_GATHERED}, {"none", FSDP_BACKWARD_WEIGHTS_NONE}};
inline const Names schedules{
    {"sequential", FSDP_SCHEDULE_SEQUENTIAL}, {"interleaved", FSDP_SCHEDULE_INTERLEAVED}, {"any", FSDP_SCHEDULE_ANY}};

inline std::string name_of(const Names &names, int32_t value) {
  for (const auto &[name, number] : names)
    if (number == value) return name;
  return "default";
}

}  // namespace plan
