/* SPDX-License-Identifier: Apache-2.0 */
/* The header compiles alone, also twice, and its INIT macros fill every field (-Wmissing-field-initializers). */
#include <fsdp.h>
#include <fsdp.h>

static fsdp_error error = FSDP_ERROR_INIT;
static fsdp_tensor tensor = FSDP_TENSOR_INIT;
static fsdp_context_options context_options = FSDP_CONTEXT_OPTIONS_INIT;
static fsdp_mesh_options mesh_options = FSDP_MESH_OPTIONS_INIT;
static fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
static fsdp_schedule_options schedule_options = FSDP_SCHEDULE_OPTIONS_INIT;
static fsdp_memory memory = FSDP_MEMORY_INIT;
static fsdp_stats stats = FSDP_STATS_INIT;
static fsdp_param param = FSDP_PARAM_INIT;
static fsdp_group_options group_options = FSDP_GROUP_OPTIONS_INIT;
static fsdp_chunk chunk = FSDP_CHUNK_INIT;
static fsdp_shard shard = FSDP_SHARD_INIT;
static fsdp_adamw_options adamw_options = FSDP_ADAMW_OPTIONS_INIT;

uint64_t sum_of_sizes(void);
uint64_t sum_of_sizes(void) {
  return error.struct_size + tensor.struct_size + context_options.struct_size + mesh_options.struct_size +
         model_options.struct_size + schedule_options.struct_size + memory.struct_size + stats.struct_size +
         param.struct_size + group_options.struct_size + chunk.struct_size + shard.struct_size +
         adamw_options.struct_size;
}
