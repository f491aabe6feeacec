// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/declaration.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/dtype.h"
#include "memory/plane.h"
#include "transport/exchange.h"

namespace fsdp::engine {

namespace {

// In debug mode, released weights must be inaccessible. Therefore nothing is gathered ahead, and a world of one rank
// gathers like a larger world.
void set_debug(memory::ModelSpec &spec) {
  spec.debug = spec.force_communication = true;
  spec.prefetches = false;
  spec.prefetch_depth = 0;
  spec.prefetch_bytes = 0;
}

}  // namespace

Declaration::Declaration(const Context &context, memory::ModelSpec spec, fsdp_optimizer optimizer,
                         GroupDefaults defaults)
    : context_(context), spec_(std::move(spec)), optimizer_(optimizer), defaults_(defaults) {
  if (adamw()) spec_.states = {{"exp_avg", FSDP_FLOAT32, true}, {"exp_avg_sq", FSDP_FLOAT32, true}};
  require_own_optimizer(defaults_.main_storage, "fsdp_create_model");
  spec_.host_memory = context.device_traits().host_memory;
  if (context.debug()) set_debug(spec_);
  plan_exchanges();
  const transport::CollectiveTraits &traits = transport::traits_of(context.transport());
  spec_.rounds_gradients_before_sending = traits.rounds_gradients_before_sending;
  spec_.receives_slices = traits.receives_slices;
  spec_.device_transport = context.device_transport();
}

void Declaration::plan_exchanges() {
  const TeamMemory exchanges = plan_team_memory(context_, spec_);
  spec_.message_bytes = exchanges.message_bytes;
  spec_.device_team_bytes = exchanges.device_bytes;
}

void Declaration::require_unsealed(const char *call) const {
  if (sealed_) fail(FSDP_INVALID_STATE, "{}: the model is sealed; declare everything before fsdp_seal_model", call);
}

// Refused because the caller would have to know how the library stores weights in these bits.
void Declaration::require_own_optimizer(fsdp_main_storage storage, const char *call) const {
  if (storage == FSDP_MAIN_SPLIT16 && !adamw())
    fail(
        FSDP_INVALID_ARGUMENT,
        "{}: main_storage FSDP_MAIN_SPLIT16 is for FSDP_OPTIMIZER_ADAMW and FSDP_OPTIMIZER_ADAMW_8BIT, and the model's "
        "optimizer is FSDP_OPTIMIZER_CALLER; take FSDP_MAIN_FLOAT32, or FSDP_MAIN_NONE and fsdp_round_stochastic",
        call);
}

void Declaration::set_optimizer(memory::ParamSpec &param, const std::string &group) const {
  if (param.frozen()) return;
  if (param.optimizer == FSDP_OPTIMIZER_ADAMW && !adamw())
    fail(FSDP_INVALID_ARGUMENT,
         "fsdp_create_group: parameter '{}' of group '{}' has optimizer FSDP_OPTIMIZER_ADAMW, but the model's is "
         "FSDP_OPTIMIZER_CALLER; create the model with FSDP_OPTIMIZER_ADAMW, and give FSDP_OPTIMIZER_CALLER to the "
         "parameters that you update",
         param.name, group);
  if (!param.optimizer) param.optimizer = adamw() ? FSDP_OPTIMIZER_ADAMW + 0 : FSDP_OPTIMIZER_CALLER + 0;
}

void Declaration::code_states(memory::ParamSpec &param, bool own_mesh) const {
  param.coded_states = codes_states() && !param.by_caller() &&
                       (own_mesh ? memory::can_code_states_of_all(param) : memory::can_code_states(param));
}

uint32_t Declaration::number_of(layout::Mesh mesh) {
  const auto known = std::ranges::find(spec_.meshes, mesh);
  const auto number = static_cast<uint32_t>(known - spec_.meshes.begin());
  if (known == spec_.meshes.end()) spec_.meshes.push_back(std::move(mesh));
  return number;
}

void Declaration::add_group(memory::GroupSpec group, layout::Mesh mesh) {
  require_unsealed("fsdp_create_group");
  require_own_optimizer(group.main_storage, "fsdp_create_group");
  if (group_names_.contains(group.name))
    fail(FSDP_INVALID_ARGUMENT, "fsdp_create_group: the model has a group named '{}' already", group.name);
  std::unordered_set<std::string> names;
  for (const auto &param : group.params)
    if (param_names_.contains(param.name) || !names.insert(param.name).second)
      fail(FSDP_INVALID_ARGUMENT,
           "fsdp_create_group: parameter '{}' of group '{}' is declared twice in the model; a tied parameter is "
           "declared once "
           "and its group visited twice",
           param.name, group.name);
  for (memory::ParamSpec &param : group.params) set_optimizer(param, group.name);
  param_names_.merge(names);
  group_names_.insert(group.name);
  const uint64_t longest = group.longest_call();
  const size_t meshes = spec_.meshes.size();
  group.mesh = number_of(std::move(mesh));
  for (memory::ParamSpec &param : group.params) {
    code_states(param, group.mesh != 0);
    if (!param.frozen()) (param.by_caller() ? caller_updates_ : adamw_updates_) = true;
  }
  spec_.mixes_optimizers = adamw_updates_ && caller_updates_;
  spec_.groups.push_back(std::move(group));
  if (longest <= longest_call_ && spec_.meshes.size() == meshes) return;
  longest_call_ = std::max(longest_call_, longest);
  plan_exchanges();
}

void Declaration::number_meshes_alike(transport::Team &team) {
  const size_t meshes = spec_.meshes.size();
  engine::number_meshes_alike(team, spec_);
  if (spec_.meshes.size() != meshes) plan_exchanges();
}

void Declaration::set_schedule(fsdp_schedule_kind kind, std::vector<fsdp_visit> visits, uint32_t held_groups) {
  require_unsealed("fsdp_set_schedule");
  spec_.schedule = kind;
  spec_.held_groups = held_groups;
  spec_.visits = std::move(visits);
}

void Declaration::add_state(memory::StateSpec state) {
  constexpr auto call = "fsdp_add_optimizer_state";
  require_unsealed(call);
  const char *const optimizer = codes_states() ? "FSDP_OPTIMIZER_ADAMW_8BIT" : "FSDP_OPTIMIZER_ADAMW";
  if (adamw() && state.name == "step")
    fail(FSDP_INVALID_ARGUMENT,
         "{}: 'step' is what checkpoints call the number of steps of {}; give the state another name", call, optimizer);
  for (const auto &known : spec_.states)
    if (codes_states() && (state.name == known.name + ".code" || state.name == known.name + ".absmax"))
      fail(FSDP_INVALID_ARGUMENT,
           "{}: '{}' is what checkpoints call the codes or scales of a state of {}; give the state another name", call,
           state.name, optimizer);
  for (const auto &known : spec_.states)
    if (known.name == state.name)
      fail(FSDP_INVALID_ARGUMENT, "{}: the model has a state '{}' already{}", call, state.name,
           adamw() && &known < spec_.states.data() + memory::adamw_states ? format_text(", which {} brings", optimizer)
                                                                          : "");
  spec_.states.push_back(std::move(state));
}

void Declaration::set_arena(fsdp_role role, void *data, uint64_t size_bytes) {
  constexpr auto call = "fsdp_set_arena";
  require_unsealed(call);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (size_bytes > UINTPTR_MAX - begin)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} bytes from {:#x} on end beyond the address space", call, size_bytes, begin);
  for (const auto &[other, arena] : arenas_) {
    const auto first = reinterpret_cast<uintptr_t>(arena.data);
    if (other != role && begin < first + arena.size_bytes && first < begin + size_bytes)
      fail(FSDP_INVALID_ARGUMENT, "{}: the memory for role {} overlaps that for role {}", call, role, other);
  }
  arenas_[role] = {static_cast<std::byte *>(data), size_bytes};
}

std::unique_ptr<memory::ModelPlan> Declaration::make_plan() const {
  if (spec_.groups.empty())
    fail(FSDP_INVALID_STATE, "fsdp_seal_model: the model has no group; call fsdp_create_group first");
  if (const auto violations = memory::find_violations(spec_); !violations.empty())
    fail(FSDP_INVALID_ARGUMENT, "fsdp_seal_model: {}{}", violations.front(),
         violations.size() > 1 ? format_text(" ({} more; fsdp_check_model lists them)", violations.size() - 1) : "");
  auto plan = std::make_unique<memory::ModelPlan>(memory::plan_model(spec_));
  if (spec_.debug)
    if (const std::string broken = validate(*plan, spec_); !broken.empty())
      fail(FSDP_INTERNAL, "fsdp_seal_model: the plan is wrong: {}", broken);
  return plan;
}

std::pmr::vector<memory::InnerPlace> places_of(const memory::ModelSpec &spec, uint32_t rank, const char *call,
                                               std::pmr::memory_resource *memory) {
  std::pmr::vector<memory::InnerPlace> places(memory);
  places.reserve(spec.meshes.size());
  for (const layout::Mesh &mesh : spec.meshes) {
    if (&mesh != &spec.mesh() && std::ranges::find(mesh.ranks, rank) == mesh.ranks.end())
      fail(FSDP_INVALID_ARGUMENT,
           "{}: rank {} is not in the mesh {{{}}} that this rank has for a group; call it on rank {}, or in a planning "
           "context of that rank",
           call, rank, fmt::join(mesh.ranks, ", "), rank);
    places.push_back({mesh.inner(mesh.index_of(rank, call)), mesh.inner_size});
  }
  return places;
}

std::vector<std::string> Declaration::list_violations(uint32_t rank, const char *call) const {
  require_unsealed(call);
  if (spec_.groups.empty()) return {"the model has no group; call fsdp_create_group first"};
  auto violations = memory::find_violations(spec_);
  if (!violations.empty()) return violations;
  memory::ModelPlan planned;
  if (const auto unplanned = capture_error([&] { planned = memory::plan_model(spec_); })) return {unplanned->message};
  const auto needed = planned.role_bytes(places_of(spec_, rank, call));
  for (const auto &[role, arena] : arenas_)
    if (arena.size_bytes < needed[role])
      violations.push_back(format_text("fsdp_set_arena: the arena for role {} has {} bytes, the model needs {}", role,
                                       arena.size_bytes, needed[role]));
  if (arenas_.contains(FSDP_ROLE_GRAD) && keeps_read_grads(planned)) violations.emplace_back(grad_arena_refusal);
  return violations;
}

// -- ranks that declared different models learn it at the seal, not from wrong numbers later --
//
// Each rank writes its declaration as lines. Ranks compare hashes of the lines. They exchange the lines only if the
// hashes differ, to find the first difference.

namespace {

// `named`: the text includes the name and the box, which may differ between meshes.
std::string describe_param(const memory::GroupSpec &group, const memory::ParamSpec &param, bool named) {
  const std::string name =
      named ? format_text("'{}'", param.name) : format_text("number {}", &param - group.params.data());
  const std::string box = named && param.is_box()
                              ? format_text(" from [{}] on of [{}]", fmt::join(param.global_offset, ", "),
                                            fmt::join(param.global_shape, ", "))
                              : "";
  return format_text(
      "parameter {} of group '{}': shape [{}]{}, dtype {}, flags {:#x}, granule {} x {}, lr_scale {}{}{}{}{}{}{}{}",
      name, group.name, fmt::join(param.shape, ", "), box, dtype_name(param.dtype), param.flags, param.granule,
      param.granule_rows, param.lr_scale,
      param.quantized() ? format_text(", quantization {}", quantization_name(param.quantization)) : "",
      param.by_caller() ? ", FSDP_OPTIMIZER_CALLER" : "", param.skips_missing() ? ", FSDP_MISSING_GRAD_SKIP" : "",
      param.coded_states ? ", states in 8 bits" : "",
      param.row_dimensions > 1 ? format_text(", row_dimensions {}", param.row_dimensions) : "",
      param.piece ? format_text(", piece {}", param.piece) : "",
      param.matrix_splits.empty() ? "" : format_text(", matrices of [{}] rows", fmt::join(param.matrix_splits, ", ")));
}

const char *outer_axis_name(layout::OuterAxis outer) {
  switch (outer) {
    case layout::OuterAxis::none: return "none";
    case layout::OuterAxis::replicate: return "replicate";
    case layout::OuterAxis::optim: return "optim";
    case layout::OuterAxis::shard: break;
  }
  return "shard";
}

// Describes the group's mesh without its ranks, because the ranks may differ.
std::string describe_mesh(const memory::ModelSpec &spec, const memory::GroupSpec &group) {
  const layout::Mesh &mesh = spec.mesh_of(group);
  if (!group.mesh) return ", the model's mesh";
  const uint32_t count = spec.mesh().size() / mesh.size();
  return format_text(", mesh {} ({} {}): replicate {} x shard {}, {} a host, outer axis {}, reduction block {}",
                     group.mesh, count, count == 1 ? "mesh" : "meshes", mesh.replicate_size, mesh.shard_size,
                     mesh.inner_size, outer_axis_name(mesh.outer), mesh.reduction_block);
}

void describe_group(std::vector<std::string> &lines, const memory::ModelSpec &spec, const memory::GroupSpec &group,
                    bool named) {
  lines.push_back(
      format_text("group '{}'{}: strategy {}, grad dtype {}, reduce dtype {}, reduce policy {}, resident {}, root {}, "
                  "main storage {}, backward weights {}, grad op {}, grad factor {}",
                  group.name, describe_mesh(spec, group), group.strategy, group.grad_dtype, group.reduce_dtype,
                  group.reduce_policy, group.resident, group.root, group.main_storage,
                  group.backward_weights ? "FSDP_BACKWARD_WEIGHTS_GATHERED" : "FSDP_BACKWARD_WEIGHTS_NONE",
                  group.grad_op ? group.grad_op : spec.grad_op, spec.factor_of(group)));
  for (const auto &param : group.params) lines.push_back(describe_param(group, param, named));
}

// A rank with a failed plan reports that after the comparison, if the declarations differ in nothing else.
constexpr auto unplanned_line = "layout hash: none, since the plan has failed";

bool differ_in_the_plan(std::string_view a, std::string_view b) { return a == unplanned_line || b == unplanned_line; }

std::vector<std::string> describe_declaration(const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                                              uint32_t of_mesh) {
  std::vector<std::string> lines;
  lines.push_back(format_text("mesh: replicate {} x shard {}, {} a host, outer axis {}, reduction block {}, ranks {}",
                              spec.mesh().replicate_size, spec.mesh().shard_size, spec.mesh().inner_size,
                              static_cast<int>(spec.mesh().outer), spec.mesh().reduction_block,
                              fmt::join(spec.mesh().ranks, ", ")));
  lines.push_back(format_text(
      "policy: debug {}, unshard mode {}, grad op {}, grad factor {}, prefetches {}, prefetch depth {}, "
      "prefetch bytes {}, "
      "max pending groups {}, max pending bytes {}, force communication {}, GPUs {}, device transport {}, "
      "save staging bytes {}, "
      "scale rounding {}, quantize from {}, scale rule {}, plane policy {}, private views {}, rounding seed {}, matrix "
      "bytes {}, state home {}, main home {}, grad home {}, turn bytes {}, turns {}",
      spec.debug, spec.unshard_mode, spec.grad_op, spec.grad_factor, spec.prefetches, spec.prefetch_depth,
      spec.prefetch_bytes, spec.max_pending_groups, spec.max_pending_bytes, spec.force_communication, !spec.host_memory,
      spec.device_transport, spec.save_staging_bytes, spec.scale_rounding, dtype_name(spec.quantize_from),
      spec.scale_rule, spec.plane_policy, spec.private_views, spec.rounding_seed, spec.matrix_bytes, spec.homes.state,
      spec.homes.main, spec.homes.grad, spec.homes.turn_bytes, spec.homes.turns));
  lines.push_back(
      format_text("schedule: kind {}, {} visits, {} held groups", spec.schedule, spec.visits.size(), spec.held_groups));
  for (const auto &visit : spec.visits)
    lines.push_back(format_text("visit: group {}, phase {}, {}", visit.group_index, visit.phase,
                                visit.piece ? format_text("piece {}", visit.piece - 1) : "whole"));
  for (const auto &state : spec.states)
    lines.push_back(format_text("optimizer state '{}': {}", state.name, dtype_name(state.dtype)));
  for (const auto &group : spec.groups) describe_group(lines, spec, group, group.mesh == 0 || group.mesh == of_mesh);
  lines.push_back(format_text("number of groups: {}", spec.groups.size()));
  lines.push_back(plan.buckets.empty() ? unplanned_line : format_text("layout hash: {:016x}", plan.layout_hash));
  return lines;
}

std::string join(const std::vector<std::string> &lines) {
  std::string text;
  for (const auto &line : lines) text.append(line).push_back('\n');
  return text;
}

std::string_view line_of(std::string_view text, size_t index) {
  for (; index; --index) {
    const size_t end = text.find('\n');
    if (end == text.npos) return "(nothing)";
    text.remove_prefix(end + 1);
  }
  if (text.empty()) return "(nothing)";
  return text.substr(0, text.find('\n'));
}

size_t first_difference(std::string_view a, std::string_view b) {
  size_t line = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()) && a[i] == b[i]; ++i) line += a[i] == '\n';
  return line;
}

// Two whole lines with the longest names do not fit into a message. In that case the excerpt has the start of the line
// and the part that differs.
std::string excerpt(std::string_view line, std::string_view other) {
  constexpr size_t most = 400, head = 120, lead = 40;
  if (line.size() <= most) return std::string(line);
  const auto same =
      static_cast<size_t>(std::mismatch(line.begin(), line.end(), other.begin(), other.end()).first - line.begin());
  const size_t from = std::max(head, same - std::min(same, lead));
  return format_text("{}{}{}", line.substr(0, head), from > head ? "..." : "", line.substr(from, most - head));
}

// Reports the lowest rank that differs from rank 0, and the line that differs. The error is the same on every rank.
// Returns normally if the only difference is that plans of some ranks have failed.
void report_difference(transport::Team &team, const std::string &mine, uint32_t model) {
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), "comparing declarations");
  const auto text = [&](size_t r) {
    return std::string_view(reinterpret_cast<const char *>(all[r].data()), all[r].size());
  };
  transport::await_readers(team);
  for (uint32_t r = 1; r < all.size(); ++r) {
    if (text(r) == text(0)) continue;
    const size_t line = first_difference(text(0), text(r));
    const std::string_view usual = line_of(text(0), line), odd = line_of(text(r), line);
    if (differ_in_the_plan(usual, odd)) continue;
    const uint32_t zero = team.world_rank(0), other = team.world_rank(r);
    fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other),
              "fsdp_seal_model: model {}: ranks declared it differently; the first difference is: rank {} has {}; rank "
              "{} has {}",
              model, zero, excerpt(usual, odd), other, excerpt(odd, usual));
  }
}

}  // namespace

void verify_declarations(transport::Team &team, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                         uint32_t model, uint32_t mesh) {
  const std::string mine = join(describe_declaration(spec, plan, mesh));
  const uint64_t hash = XXH64(mine.data(), mine.size(), 0);
  if (!team.agree({.same = hash}, "fsdp_seal_model: declarations").agreed()) report_difference(team, mine, model);
}

}  // namespace fsdp::engine
