// SPDX-License-Identifier: Apache-2.0
#include "perf/abi_model.h"

#include <fmt/format.h>

namespace perf {

// Ranks that are threads get their contexts from the first one.
void AbiModel::join(Bench &bench, uint32_t size) {
  fsdp_context *mine = nullptr;
  if (size == 1) {
    tools::check(fsdp_create_local_contexts(1, nullptr, &mine));
  } else if (bench.request.threads) {
    std::vector<fsdp_context *> all(size);
    if (bench.rank() == 0) tools::check(fsdp_create_local_contexts(size, nullptr, all.data()));
    mine = static_cast<fsdp_context **>(bench.lab.share_handle(all.data()))[bench.rank()];
    bench.lab.meet();  // rank 0's array has been read
  } else {
    static uint32_t count = 0;
    const std::string name = fmt::format("{}-abi-{}", bench.rendezvous, ++count);
    fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
    options.world_size = size;
    options.rank = bench.rank();
    options.rendezvous = name.c_str();
    tools::check(fsdp_create_context(&options, &mine));
  }
  context.reset(mine);
}

AbiModel::AbiModel(Bench &bench, uint32_t size, const fsdp_model_options &options,
                   const std::vector<GroupShape> &shapes) {
  join(bench, size);
  fsdp_model *made = nullptr;
  check(fsdp_create_model(context.get(), &options, &made));
  model.reset(made);
  for (const GroupShape &shape : shapes) add_group(shape);
  check(fsdp_seal_model(model.get()));
  check(fsdp_publish_weights(model.get(), nullptr));
}

void AbiModel::add_group(const GroupShape &shape) {
  const std::string name = fmt::format("group.{}", groups.size());
  std::vector<std::string> names;
  std::vector<fsdp_param> params;
  for (uint64_t i = 0; i < shape.param_count; ++i) names.push_back(fmt::format("{}.{}", name, i));
  for (uint64_t i = 0; i < shape.param_count; ++i) {
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = names[i].c_str();
    param.shape = &shape.elements;
    param.dimension_count = 1;
    params.push_back(param);
  }
  fsdp_group *group = nullptr;
  check(
      fsdp_create_group(model.get(), name.c_str(), params.data(), params.size(), sizeof(fsdp_param), nullptr, &group));
  groups.push_back(group);
  shapes.push_back(shape);
}

namespace {
float pattern(size_t group, uint64_t i) { return static_cast<float>(group + i % 1024); }
}  // namespace

void AbiModel::load_pattern() {
  check(fsdp_begin_update(model.get(), nullptr));
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<float> values(shapes[g].elements);
    for (uint64_t i = 0; i < values.size(); ++i) values[i] = pattern(g, i);
    for (uint64_t p = 0; p < shapes[g].param_count; ++p)
      check(fsdp_load_param(groups[g], p, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  }
  check(fsdp_publish_weights(model.get(), nullptr));
}

uint64_t AbiModel::count_wrong(size_t group) {
  uint64_t wrong = 0;
  check(fsdp_unshard(groups[group], FSDP_EVAL, 0, nullptr));
  for (uint64_t p = 0; p < shapes[group].param_count; ++p) {
    fsdp_tensor tensor = FSDP_TENSOR_INIT;
    check(fsdp_get_param(groups[group], p, FSDP_EVAL, &tensor));
    for (uint64_t i = 0; i < tensor.element_count; ++i)
      wrong += static_cast<const float *>(tensor.data)[i] != pattern(group, i);
  }
  check(fsdp_reshard(groups[group], FSDP_EVAL, 0, nullptr));
  return wrong;
}

AbiModel::~AbiModel() {
  model.reset();
  // Peers may still be at work. If closing fails, another call has reported the reason.
  [[maybe_unused]] const fsdp_status status = fsdp_close_context(context.get());
}

}  // namespace perf
