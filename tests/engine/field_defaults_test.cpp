// SPDX-License-Identifier: Apache-2.0
// A field that is 0 has its default: the seal finds no difference between a rank that leaves it 0 and one that writes
// it.
#include <gtest/gtest.h>

#include <atomic>

#include "fields.h"
#include "harness.h"

using namespace harness;
using namespace fields;

namespace {

// If one rank leaves a field 0 and another writes its default, the models are the same; another value makes them
// differ. The seal compares what the ranks have declared.
struct Default {
  const char *of, *field;
  double meant, other;
};
const Default defaults[] = {
    {"fsdp_model_options", "strategy", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_STRATEGY_OPTIM_GRADS},
    {"fsdp_model_options", "unshard_mode", FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED},
    {"fsdp_model_options", "view_kind", FSDP_VIEWS_READ_ONLY, FSDP_VIEWS_PRIVATE},
    {"fsdp_model_options", "grad_op", FSDP_GRAD_OP_MEAN, FSDP_GRAD_OP_SUM},
    {"fsdp_model_options", "reduce_policy", FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST},
    {"fsdp_model_options", "optimizer", FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_CALLER},
    {"fsdp_model_options", "max_pending_groups", 2, 3},
    {"fsdp_model_options", "prefetch_depth", 1, 2},
    {"fsdp_model_options", "scale_rounding", FSDP_SCALE_EXACT, FSDP_SCALE_POWER_OF_TWO},
    {"fsdp_model_options", "quantize_from", FSDP_FLOAT32, FSDP_BFLOAT16},
    {"fsdp_model_options", "scale_rule", FSDP_SCALE_ROUND_UP, FSDP_SCALE_FLOOR},
    {"fsdp_model_options", "plane_policy", FSDP_PLANES_BY_PHASE, FSDP_PLANES_BOTH},
    {"fsdp_model_options", "main_storage", FSDP_MAIN_FLOAT32, FSDP_MAIN_SPLIT16},
    {"fsdp_model_options", "rounding_seed", 0, 1},
    {"fsdp_model_options", "matrix_bytes", 0, 4096},
    {"fsdp_group_options", "main_storage", FSDP_MAIN_FLOAT32, FSDP_MAIN_NONE},
    {"fsdp_group_options", "backward_weights", FSDP_BACKWARD_WEIGHTS_GATHERED, FSDP_BACKWARD_WEIGHTS_NONE},
    {"fsdp_group_options", "strategy", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_STRATEGY_OPTIM_GRADS},
    {"fsdp_group_options", "grad_op", FSDP_GRAD_OP_MEAN, FSDP_GRAD_OP_SUM},
    {"fsdp_param", "dtype", FSDP_FLOAT32, FSDP_FLOAT16},
    {"fsdp_param", "granule", FSDP_GRANULE_ROW, FSDP_GRANULE_TENSOR},
    {"fsdp_param", "lr_scale", 1, 0.5},
    {"fsdp_param", "row_dimensions", 1, 2},
    {"fsdp_param", "missing_grad", FSDP_MISSING_GRAD_ZEROS, FSDP_MISSING_GRAD_SKIP},
    {"fsdp_param", "optimizer", FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_CALLER},
    {"fsdp_param", "matrix", 0, FSDP_MATRIX_LAST_TWO},
    {"fsdp_mesh_options", "replicate_size", 1, 2},
    {"fsdp_mesh_options", "shard_size", 2, 1},
};

// Rank 1 writes the value, rank 0 leaves 0.
fsdp_status seal_with(const Default &one, double value) {
  Scenario scenario;
  scenario.ranks = 2;
  std::atomic<fsdp_status> worst{FSDP_OK};
  run_threads(scenario, [&](uint32_t rank, fsdp_context *context) {
    const auto write = [&](auto &options, const std::string &name) {
      if (rank == 1 && name == one.of) poke(options, name, one.field, value);
    };
    fsdp_mesh_options mesh_options = FSDP_MESH_OPTIONS_INIT;
    fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
    fsdp_group_options group_options = FSDP_GROUP_OPTIONS_INIT;
    fsdp_param param = FSDP_PARAM_INIT;
    const uint64_t shape[] = {4, 8};
    param.name = "w";
    param.shape = shape;
    param.dimension_count = 2;
    write(mesh_options, "fsdp_mesh_options");
    write(model_options, "fsdp_model_options");
    write(group_options, "fsdp_group_options");
    write(param, "fsdp_param");
    fsdp_mesh *mesh = nullptr;
    fsdp_model *model = nullptr;
    fsdp_group *group = nullptr;
    FSDP(fsdp_create_mesh(context, &mesh_options, &mesh));
    model_options.mesh = mesh;
    FSDP(fsdp_create_model(context, &model_options, &model));
    FSDP(fsdp_create_group(model, "all", &param, 1, sizeof param, &group_options, &group));
    if (const fsdp_status status = fsdp_seal_model(model)) worst = status;
    fsdp_destroy_model(model);
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
  return worst;
}

TEST(Fields, AZeroIsWhatTheHeaderSays) {
  for (const Default &one : defaults) {
    EXPECT_EQ(seal_with(one, one.meant), FSDP_OK) << one.of << "." << one.field;
    EXPECT_EQ(seal_with(one, one.other), FSDP_MISMATCH) << one.of << "." << one.field;
  }
}

}  // namespace
