// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>

#include "device.h"
#include "harness.h"

namespace harness {
Rank::Rank(fsdp_context *context, const Scenario &setup, bool seal) : setup(setup), context(context) {
  FSDP(fsdp_get_rank(context, &rank));
  fsdp_mesh *mesh = nullptr;
  if (setup.mesh.replicate_size || setup.mesh.shard_size || setup.mesh.reduction_block_size)
    FSDP(fsdp_create_mesh(context, &setup.mesh, &mesh));
  fsdp_model_options options = place(setup.model);
  options.mesh = mesh;
  const fsdp_status status = fsdp_create_model(context, &options, &model);
  fsdp_destroy_mesh(mesh);
  check(status, "fsdp_create_model");
  try {
    declare(seal);
  } catch (...) {
    fsdp_destroy_model(model);  // there will be no destructor
    throw;
  }
}

void Rank::declare(bool seal) {
  bool has_own = false;
  for (const GroupDef &def : setup.groups) {
    std::vector<fsdp_param> params;
    std::deque<std::string> names;
    for (const ParamDef &param : def.params) {
      fsdp_param p = FSDP_PARAM_INIT;
      const std::string part = def.meshes > 1 ? "." + std::to_string(rank % def.meshes) : "";
      p.name = names.emplace_back(param.name + part).c_str();
      p.shape = param.shape.data();
      p.dimension_count = static_cast<uint32_t>(param.shape.size());
      p.dtype = param.dtype;
      p.flags = param.flags;
      p.granule = param.granule;
      p.granule_rows = param.granule_rows;
      p.lr_scale = param.lr_scale;
      p.quantization = param.quantization;
      p.missing_grad = param.missing_grad;
      p.row_dimensions = param.row_dimensions;
      p.piece = param.piece;
      p.optimizer = param.optimizer;
      has_own = has_own || param.by_caller();
      p.matrix = param.matrix;
      if (!param.splits.empty()) {
        p.matrix_splits = param.splits.data();
        p.matrix_split_count = param.splits.size();
      }
      if (!param.global_shape.empty()) {
        p.global_shape = param.global_shape.data();
        p.global_offset = param.global_offset.data();
      }
      params.push_back(p);
    }
    fsdp_group *group = nullptr;
    fsdp_group_options options = def.options;
    if (def.meshes > 1) options.mesh = mesh_of(def);
    const fsdp_status status =
        fsdp_create_group(model, def.name.c_str(), params.data(), params.size(), sizeof(fsdp_param), &options, &group);
    if (def.meshes > 1) fsdp_destroy_mesh(const_cast<fsdp_mesh *>(options.mesh));
    check(status, "fsdp_create_group");
    groups.push_back(group);
  }
  if (setup.schedule != FSDP_SCHEDULE_SEQUENTIAL) {
    fsdp_schedule_options options = FSDP_SCHEDULE_OPTIONS_INIT;
    options.visits = setup.visits.data();
    options.visit_count = setup.visits.size();
    options.visit_stride = sizeof(fsdp_visit);
    options.held_groups = setup.held_groups;
    FSDP(fsdp_set_schedule(model, setup.schedule, &options));
  }
  if (has_own) FSDP(fsdp_add_optimizer_state(model, "momentum", FSDP_FLOAT32));
  if (seal) FSDP(fsdp_seal_model(model));
}

fsdp_mesh *Rank::mesh_of(const GroupDef &def) const {
  std::vector<uint32_t> members;
  uint32_t world_size = 0;
  FSDP(fsdp_get_world_size(context, &world_size));
  for (uint32_t r = rank % def.meshes; r < world_size; r += def.meshes) members.push_back(r);
  return make_mesh(context, members);
}

Rank::~Rank() { fsdp_destroy_model(model); }

void Rank::load() {
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t p = 0; p < def(g).params.size(); ++p) {
      std::vector<float> data(def(g).params[p].count());
      for (uint64_t i = 0; i < data.size(); ++i) data[i] = initial_weight(setup.ordinal(g, p), i);
      FSDP(fsdp_load_param(groups[g], p, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
    }
  FSDP(fsdp_publish_weights(model, stream()));
}

std::vector<float> Rank::read(size_t group, size_t param) const {
  std::vector<float> data(def(group).params[param].count());
  FSDP(fsdp_read_param(groups[group], param, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
  return data;
}

std::vector<std::vector<float>> Rank::read_all() const {
  std::vector<std::vector<float>> weights;
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t p = 0; p < def(g).params.size(); ++p) weights.push_back(read(g, p));
  return weights;
}

std::vector<fsdp_shard> Rank::shards() const {
  uint64_t count = 0;
  FSDP(fsdp_get_shard_count(model, &count));
  std::vector<fsdp_shard> shards(count, fsdp_shard(FSDP_SHARD_INIT));
  for (uint64_t s = 0; s < count; ++s) FSDP(fsdp_get_shard(model, s, &shards[s]));
  return shards;
}

Memory memory_of(fsdp_model *model, uint32_t rank) {
  Memory memory;
  FSDP(fsdp_get_model_info(model, &memory));
  for (fsdp_role role = FSDP_ROLE_ALL; role <= last_role; ++role)
    FSDP(fsdp_get_role_bytes(model, role, rank, &memory.role_bytes[role]));
  return memory;
}

Stats Rank::stats() const {
  Stats stats;
  FSDP(fsdp_get_stats(model, &stats));
  for (fsdp_role role = FSDP_ROLE_ALL; role <= last_role; ++role)
    FSDP(fsdp_get_allocated_bytes(model, role, &stats.allocated_bytes[role]));
  return stats;
}

Blocks Rank::planes(size_t group, size_t param, fsdp_phase phase, uint64_t *address) const {
  const ParamDef &known = def(group).params[param];
  const bool columns = known.quantization == FSDP_QUANTIZE_MXFP8 && phase == FSDP_BACKWARD;
  fsdp_tensor codes = FSDP_TENSOR_INIT, scales = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_plane(groups[group], param, phase, columns ? FSDP_PLANE_COLUMN : FSDP_PLANE_ROW, &codes));
  FSDP(fsdp_get_plane(groups[group], param, phase, columns ? FSDP_PLANE_COLUMN_SCALE : FSDP_PLANE_ROW_SCALE, &scales));
  REQUIRE(codes.dtype == FSDP_FLOAT8_E4M3 && codes.element_size == 1);
  REQUIRE(scales.dtype == (known.quantization == FSDP_QUANTIZE_MXFP8 ? FSDP_E8M0 + 0 : FSDP_FLOAT32 + 0));
  const std::vector<uint64_t> scale = scale_shape(known.shape, block_of(known.quantization, columns));
  REQUIRE(std::equal(known.shape.begin(), known.shape.end(), codes.shape, codes.shape + codes.dimension_count));
  REQUIRE(std::equal(scale.begin(), scale.end(), scales.shape, scales.shape + scales.dimension_count));
  if (address) *address = reinterpret_cast<uint64_t>(codes.data);
  Blocks blocks{std::vector<uint8_t>(codes.element_count),
                load_elements(scales.data, scales.dtype, scales.element_count)};
  copy_out(blocks.codes.data(), codes.data, blocks.codes.size());
  return blocks;
}

std::vector<float> Rank::view(size_t group, size_t param, fsdp_phase phase, uint64_t *address) const {
  const ParamDef &known = def(group).params[param];
  if (known.quantization)
    return dequantize(planes(group, param, phase, address), known.shape,
                      block_of(known.quantization, phase == FSDP_BACKWARD));
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_param(groups[group], param, phase, &tensor));
  if (address) *address = reinterpret_cast<uint64_t>(tensor.data);
  return load_elements(tensor.data, tensor.dtype, tensor.element_count);
}

}  // namespace harness
