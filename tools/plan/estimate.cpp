// SPDX-License-Identifier: Apache-2.0
#include "plan/estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

#include "handles.h"

namespace plan {
namespace {

using tools::check;

// A sealed model of a planning context. Members are destroyed in reverse order, the context last.
struct Planned {
  tools::Context context;
  std::vector<tools::Mesh> meshes;  // the model's mesh first
  tools::Model model;
};

fsdp_mesh *add_mesh(Planned &planned, const fsdp_mesh_options &options) {
  fsdp_mesh *mesh = nullptr;
  check(fsdp_create_mesh(planned.context.get(), &options, &mesh), planned.context.get());
  planned.meshes.emplace_back(mesh);
  return mesh;
}

bool has_mesh(const GroupSpec &group) { return group.meshes > 1 || group.replicate; }

// The mesh of rank 0 for a group.
fsdp_mesh *add_mesh(Planned &planned, const GroupSpec &group, const Policy &policy) {
  if (policy.ranks % group.meshes != 0)
    throw std::invalid_argument(
        fmt::format("group '{}': {} ranks are not a multiple of {} meshes", group.name, policy.ranks, group.meshes));
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < policy.ranks; rank += group.meshes) ranks.push_back(rank);
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.ranks = ranks.data();
  options.rank_count = static_cast<uint32_t>(ranks.size());
  options.replicate_size = std::max(group.replicate, 1u);
  return add_mesh(planned, options);
}

fsdp_model_options describe_policy(const Policy &policy, const fsdp_mesh *mesh) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.mesh = mesh;
  options.flags = policy.prefetch == 0 ? FSDP_MODEL_NO_PREFETCH : 0;
  options.strategy = policy.strategy;
  options.grad_dtype = policy.grad_dtype;
  options.reduce_dtype = policy.reduce_dtype;
  options.unshard_mode = policy.unshard_mode;
  options.reduce_policy = policy.reduce_policy;
  options.optimizer = policy.optimizer == FSDP_OPTIMIZER_ADAMW ? policy.states : policy.optimizer;
  options.main_storage = policy.main_storage;
  options.prefetch_depth = policy.prefetch;
  options.save_staging_bytes = policy.save_staging;
  options.matrix_bytes = policy.matrix_bytes;
  options.state_home = policy.state_home;
  options.main_home = policy.main_home;
  options.grad_home = policy.grad_home;
  options.home_directory = ".";  // a planning context makes no file
  options.turn_bytes = policy.turn_bytes;
  options.turns = policy.turns;
  options.max_pending_groups = policy.max_pending_groups;
  options.max_pending_bytes = policy.max_pending_bytes;
  options.outer_strategy = policy.outer;
  return options;
}

void add_group(Planned &planned, const GroupSpec &group, const Policy &policy) {
  std::vector<fsdp_param> params;
  for (const auto &spec : group.params) {
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = spec.name.c_str();
    param.shape = spec.shape.data();
    param.dimension_count = static_cast<uint32_t>(spec.shape.size());
    param.dtype = spec.dtype != 0 ? spec.dtype : policy.compute_dtype;
    param.flags = spec.flags;
    param.granule = spec.granule;
    param.granule_rows = spec.granule_rows;
    param.row_dimensions = spec.row_dimensions;
    param.quantization = spec.quantization;
    param.piece = spec.piece;
    param.optimizer = spec.optimizer;
    param.matrix = spec.matrix;
    param.matrix_splits = spec.matrix_splits.empty() ? nullptr : spec.matrix_splits.data();
    param.matrix_split_count = spec.matrix_splits.size();
    params.push_back(param);
  }
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
  options.flags = group.flags;
  options.strategy = group.strategy;
  options.grad_dtype = group.grad_dtype;
  options.reduce_dtype = group.reduce_dtype;
  options.main_storage = group.main_storage;
  options.backward_weights = group.backward_weights;
  if (has_mesh(group)) options.mesh = add_mesh(planned, group, policy);
  fsdp_group *handle = nullptr;
  check(fsdp_create_group(planned.model.get(), group.name.c_str(), params.data(), params.size(), sizeof(fsdp_param),
                          &options, &handle),
        planned.context.get());
}

// The forward visits are in the order of pieces, and the backward visits in reverse.
std::vector<fsdp_visit> list_visits(const ModelSpec &spec) {
  std::vector<fsdp_visit> visits;
  for (uint32_t g = 0; g < spec.groups.size(); ++g) {
    const auto &params = spec.groups[g].params;
    const uint32_t last = params.empty() ? 0 : params.back().piece;
    for (uint32_t p = 0; p <= last; ++p) visits.push_back({g, FSDP_FORWARD, FSDP_PIECE(p)});
  }
  for (size_t i = visits.size(); i-- > 0;) visits.push_back({visits[i].group_index, FSDP_BACKWARD, visits[i].piece});
  return visits;
}

// Does the caller update some parameters, where AdamW is the model's optimizer?
bool has_own_optimizer(const ModelSpec &spec) {
  return std::ranges::any_of(spec.groups, [](const GroupSpec &group) {
    return std::ranges::any_of(group.params,
                               [](const ParamSpec &param) { return param.optimizer == FSDP_OPTIMIZER_CALLER; });
  });
}

Planned seal(const ModelSpec &spec, const Policy &policy) {
  Planned planned;
  fsdp_context *context = nullptr;
  fsdp_context_options context_options = FSDP_CONTEXT_OPTIONS_INIT;
  context_options.ranks_per_host = policy.ranks_per_host;
  check(fsdp_create_plan_context(policy.ranks, 0, &context_options, &context));
  planned.context.reset(context);

  fsdp_mesh_options mesh_options = FSDP_MESH_OPTIONS_INIT;
  mesh_options.replicate_size = policy.replicate;
  mesh_options.shard_size = policy.ranks / policy.replicate;
  const auto options = describe_policy(policy, add_mesh(planned, mesh_options));
  fsdp_model *model = nullptr;
  check(fsdp_create_model(context, &options, &model), context);
  planned.model.reset(model);

  for (const auto &group : spec.groups) add_group(planned, group, policy);
  if (policy.optimizer == FSDP_OPTIMIZER_ADAMW && has_own_optimizer(spec))
    check(fsdp_add_optimizer_state(model, "momentum", FSDP_FLOAT32), context);
  fsdp_schedule_options schedule_options = FSDP_SCHEDULE_OPTIONS_INIT;
  schedule_options.held_groups = policy.held_groups;
  const std::vector<fsdp_visit> visits = policy.by_piece ? list_visits(spec) : std::vector<fsdp_visit>();
  schedule_options.visits = visits.data();
  schedule_options.visit_count = visits.size();
  schedule_options.visit_stride = sizeof(fsdp_visit);
  check(fsdp_set_schedule(model, policy.by_piece ? FSDP_SCHEDULE_VISITS + 0 : policy.schedule, &schedule_options),
        context);
  check(fsdp_seal_model(model), context);
  return planned;
}

Memory read_memory(const Planned &planned, uint32_t rank) {
  Memory memory;
  for (fsdp_role role = FSDP_ROLE_ALL; role <= FSDP_ROLE_HOME; ++role)
    check(fsdp_get_role_bytes(planned.model.get(), role, rank, &memory.role_bytes[role]), planned.context.get());
  return memory;
}

Memory estimate_one_rank(const ModelSpec &spec, Policy policy, fsdp_strategy strategy) {
  policy.ranks = policy.replicate = 1;
  policy.outer = 0;
  policy.ranks_per_host = 0;
  policy.strategy = strategy;
  if (strategy == FSDP_STRATEGY_NO_SHARD) policy.grad_home = FSDP_HOME_DEVICE;  // whole gradients have no other
  auto whole = spec;
  for (auto &group : whole.groups) group.strategy = 0, group.meshes = 1, group.replicate = 0;
  return read_memory(seal(whole, policy), 0);
}

nlohmann::json read_json(const Planned &planned, decltype(fsdp_describe_model) *get) {
  uint64_t size = 0;
  check(get(planned.model.get(), nullptr, &size), planned.context.get());
  std::string text(size, '\0');
  check(get(planned.model.get(), text.data(), &size), planned.context.get());
  return nlohmann::json::parse(text.c_str());
}

Matrices read_matrices(const nlohmann::json &planned) {
  Matrices matrices;
  std::map<uint32_t, MatrixOwner> owners;
  for (const auto &wave : planned.at("waves"))
    for (const auto &matrix : wave.at("matrices")) {
      ++matrices.count;
      if (!matrix.at("owner").is_null()) ++owners[matrix.at("owner").get<uint32_t>()].matrices;
    }
  double sum = 0;
  for (const auto &load : planned.at("loads")) sum += load.at("cost").get<double>();
  for (const auto &load : planned.at("loads"))
    if (const auto owner = owners.find(load.at("rank").get<uint32_t>()); owner != owners.end())
      owner->second.load = load.at("cost").get<double>() / sum * static_cast<double>(planned.at("loads").size());
  for (const auto &[rank, owner] : owners) matrices.owners.push_back({rank, owner.matrices, owner.load});
  matrices.waves = planned.at("waves").size();
  matrices.limit_bytes = planned.at("matrix_bytes");
  matrices.wire_bytes = planned.at("wire_bytes");
  matrices.load = planned.at("load_max_over_mean");
  return matrices;
}

Pieces read_pieces(const nlohmann::json &described) {
  Pieces pieces;
  for (const auto &group : described.at("groups")) {
    const auto of_group = group.value("pieces", nlohmann::json::array());
    for (size_t p = 0; p < of_group.size(); ++p) {
      ++pieces.count;
      const auto elements = of_group[p].at("elements").get<double>(), padding = of_group[p].at("padding").get<double>();
      if (padding / elements < pieces.worst_padding || (pieces.count > 1 && padding / elements == pieces.worst_padding))
        continue;
      pieces.worst_padding = padding / elements;
      pieces.worst_name = "piece " + std::to_string(p) + " of group '" + group.at("name").get<std::string>() + "'";
    }
  }
  return pieces;
}

std::vector<std::pair<std::string, uint64_t>> read_planes(const nlohmann::json &described) {
  std::vector<std::pair<std::string, uint64_t>> planes;
  for (const auto &group : described.at("groups"))
    for (const auto &bucket : group.at("buckets"))
      for (const auto &plane : bucket.value("planes", nlohmann::json::array())) {
        const std::string name = plane.at("name");
        auto found = std::find_if(planes.begin(), planes.end(), [&](const auto &known) { return known.first == name; });
        if (found == planes.end()) found = planes.insert(planes.end(), {name, 0});
        found->second += plane.at("full_bytes").get<uint64_t>();
      }
  return planes;
}

// Of the ranks of a shard axis, the one with the most bytes.
struct LargestRank {
  Memory memory;
  uint32_t rank = 0;
  uint64_t smallest_total = UINT64_MAX;
};

// This plan knows rank 0's meshes only. It answers for ranks that are in all of them; the other ranks need the same
// memory, because the meshes of a group are alike.
LargestRank find_largest(const Planned &planned, const ModelSpec &spec, const Policy &policy) {
  uint32_t apart = 1;
  for (const auto &group : spec.groups) apart = std::lcm(apart, group.meshes);
  LargestRank largest;
  for (uint32_t rank = 0; rank < policy.ranks / policy.replicate; rank += apart) {
    const auto memory = read_memory(planned, rank);
    if (rank == 0 || memory.total() > largest.memory.total()) largest.memory = memory, largest.rank = rank;
    largest.smallest_total = std::min(largest.smallest_total, memory.total());
  }
  return largest;
}

// Tries a quarter and a half of the gradient buffers as the limit.
ByParts propose_limit(const ModelSpec &spec, Policy policy, const Memory &without) {
  const uint64_t gradients = without.role_bytes[FSDP_ROLE_REDUCE];
  if (policy.max_pending_bytes || gradients < 4) return {};
  for (const uint64_t limit : {gradients / 4, gradients / 2}) {
    policy.max_pending_bytes = limit;
    try {
      const Memory with = find_largest(seal(spec, policy), spec, policy).memory;
      if (with.in_memory() <= without.in_memory() / 20 * 19) return {limit, with.total()};
    } catch (const std::runtime_error &) {  // the limit is too little
    }
  }
  return {};
}

}  // namespace

Estimate estimate(const ModelSpec &spec, const Policy &policy) {
  Estimate result{};
  const auto planned = seal(spec, policy);
  result.info = FSDP_MODEL_INFO_INIT;
  check(fsdp_get_model_info(planned.model.get(), &result.info), planned.context.get());
  const auto [largest, largest_rank, smallest_total] = find_largest(planned, spec, policy);
  result.largest = largest;
  result.largest_rank = largest_rank;
  result.smallest_total = smallest_total;
  const nlohmann::json described = read_json(planned, fsdp_describe_model);
  result.matrices = read_matrices(read_json(planned, fsdp_get_matrix_plan));
  result.planes = read_planes(described);
  result.pieces = read_pieces(described);
  result.by_parts = propose_limit(spec, policy, result.largest);
  result.unsharded = estimate_one_rank(spec, policy, FSDP_STRATEGY_NO_SHARD);
  result.all_shards = estimate_one_rank(spec, policy, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  result.groups = spec.groups.size();
  for (const auto &group : spec.groups) result.params += group.params.size();
  return result;
}

}  // namespace plan
