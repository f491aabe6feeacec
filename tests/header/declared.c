/* SPDX-License-Identifier: Apache-2.0 */
/* The header compiles alone, also twice, and its INIT macros fill every field (-Wmissing-field-initializers).
 * WITH_MAIN: a program that looks at what macros have written. */
#include <fsdp.h>

static fsdp_error error = FSDP_ERROR_INIT;
static fsdp_tensor tensor = FSDP_TENSOR_INIT;
static fsdp_context_options context_options = FSDP_CONTEXT_OPTIONS_INIT;
static fsdp_mesh_options mesh_options = FSDP_MESH_OPTIONS_INIT;
static fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
static fsdp_schedule_options schedule_options = FSDP_SCHEDULE_OPTIONS_INIT;
static fsdp_model_info model_info = FSDP_MODEL_INFO_INIT;
static fsdp_group_info group_info = FSDP_GROUP_INFO_INIT;
static fsdp_stats stats = FSDP_STATS_INIT;
static fsdp_param param = FSDP_PARAM_INIT;
static fsdp_group_options group_options = FSDP_GROUP_OPTIONS_INIT;
static fsdp_chunk chunk = FSDP_CHUNK_INIT;
static fsdp_shard shard = FSDP_SHARD_INIT;
static fsdp_adamw_options adamw_options = FSDP_ADAMW_OPTIONS_INIT;

#ifndef __cplusplus
/* In C one expression describes a shape, a dtype and flags. */
static int describe_in_c(uint64_t width) {
  const fsdp_param params[] = {FSDP_PARAM("qkv", 3 * width, width),
                               FSDP_PARAM_OF(FSDP_BFLOAT16, FSDP_PARAM_NO_DECAY, "bias", width)};
  const fsdp_param *qkv = &params[0], *bias = &params[1];
  if (qkv->struct_size != sizeof *qkv || qkv->name[0] != 'q' || qkv->dimension_count != 2) return 0;
  if (qkv->shape[0] != 3 * width || qkv->shape[1] != width || qkv->dtype != FSDP_FLOAT32 || qkv->flags != 0) return 0;
  if (bias->struct_size != sizeof *bias || bias->name[0] != 'b' || bias->dimension_count != 1) return 0;
  return bias->shape[0] == width && bias->dtype == FSDP_BFLOAT16 && bias->flags == FSDP_PARAM_NO_DECAY;
}
static int measure(const fsdp_param *first, uint64_t count, uint64_t stride) {
  return first->struct_size == sizeof *first && count == 3 && stride == sizeof *first;
}
#endif

uint64_t count_wrong(void);
uint64_t count_wrong(void) {
  uint64_t wrong = 0;
#ifndef __cplusplus
  const fsdp_param params[] = {FSDP_PARAM_INIT, FSDP_PARAM_INIT, FSDP_PARAM_INIT};
  wrong += !describe_in_c(8);
  wrong += !measure(FSDP_ARRAY(params));
#endif
  wrong += error.struct_size != sizeof error;
  wrong += tensor.struct_size != sizeof tensor;
  wrong += context_options.struct_size != sizeof context_options;
  wrong += mesh_options.struct_size != sizeof mesh_options;
  wrong += model_options.struct_size != sizeof model_options;
  wrong += schedule_options.struct_size != sizeof schedule_options;
  wrong += model_info.struct_size != sizeof model_info;
  wrong += group_info.struct_size != sizeof group_info;
  wrong += stats.struct_size != sizeof stats;
  wrong += param.struct_size != sizeof param;
  wrong += group_options.struct_size != sizeof group_options;
  wrong += chunk.struct_size != sizeof chunk;
  wrong += shard.struct_size != sizeof shard;
  wrong += adamw_options.struct_size != sizeof adamw_options;
  return wrong;
}

#ifdef WITH_MAIN
int main(void) { return count_wrong() != 0; }
#endif
