// SPDX-License-Identifier: Apache-2.0
#include "engine/model.h"

#include <algorithm>

namespace fsdp::engine {

Model::Model(std::shared_ptr<Context> context, memory::ModelSpec spec, fsdp_optimizer optimizer, GroupDefaults defaults)
    : context_(std::move(context)), spec_(std::move(spec)), optimizer_kind_(optimizer), defaults_(defaults) {
  if (optimizer_kind_ == FSDP_OPTIMIZER_ADAMW)
    spec_.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
  spec_.host_memory = context_->on_host();
  const TeamMemory exchanges = plan_team_memory(*context_, spec_.mesh, spec_.communicates());
  spec_.message_bytes = exchanges.message_bytes;
  spec_.device_team_bytes = exchanges.device_bytes;
  spec_.rounds_before_sending = !spec_.host_memory;
  spec_.device_transport = context_->device_transport();
  context_->add_model(this);
}

Model::~Model() {
  context_->remove_model(this);
  await_prepared();
}

void Model::require_unsealed(const char *call) const {
  if (sealed_) fail(FSDP_INVALID_STATE, "{}: the model is sealed; declare everything before fsdp_seal_model", call);
}

uint32_t Model::add_group(memory::GroupSpec group) {
  require_unsealed("fsdp_create_group");
  if (group_names_.contains(group.name))
    fail(FSDP_INVALID_ARGUMENT, "fsdp_create_group: the model has a group named '{}' already", group.name);
  std::unordered_set<std::string> names;
  for (const auto &param : group.params)
    if (param_names_.contains(param.name) || !names.insert(param.name).second)
      fail(FSDP_INVALID_ARGUMENT,
           "fsdp_create_group: parameter '{}' of group '{}' is declared twice in the model; a tied parameter is declared once "
           "and its group visited twice",
           param.name, group.name);
  param_names_.merge(names);
  group_names_.insert(group.name);
  spec_.groups.push_back(std::move(group));
  return static_cast<uint32_t>(spec_.groups.size() - 1);
}

void Model::set_schedule(fsdp_schedule_kind kind, std::vector<fsdp_visit> visits) {
  require_unsealed("fsdp_set_schedule");
  spec_.schedule = kind;
  spec_.visits = std::move(visits);
}

void Model::add_state(memory::StateSpec state) {
  constexpr auto call = "fsdp_add_optimizer_state";
  require_unsealed(call);
  if (optimizer_kind_ != FSDP_OPTIMIZER_CALLER)
    fail(FSDP_INVALID_STATE, "{}: the model's optimizer is FSDP_OPTIMIZER_ADAMW, which brings its own states; create the model "
                             "with FSDP_OPTIMIZER_CALLER",
         call);
  for (const auto &known : spec_.states)
    if (known.name == state.name) fail(FSDP_INVALID_ARGUMENT, "{}: the model has a state '{}' already", call, state.name);
  spec_.states.push_back(std::move(state));
}

void Model::set_arena(fsdp_role role, void *data, uint64_t size_bytes) {
  require_unsealed("fsdp_set_arena");
  arenas_[role] = {static_cast<std::byte *>(data), size_bytes};
}

void Model::seal() {
  require_unsealed("fsdp_seal_model");
  context_->require_no_other_capture(nullptr, "fsdp_seal_model");
  if (context_->planning()) {
    plan_ = make_plan();
    sealed_ = true;
    return;
  }
  seal_running();
}

std::unique_ptr<memory::ModelPlan> Model::make_plan() const {
  if (spec_.groups.empty()) fail(FSDP_INVALID_STATE, "fsdp_seal_model: the model has no group; call fsdp_create_group first");
  if (spec_.schedule == FSDP_SCHEDULE_INTERLEAVED)
    for (const auto &group : spec_.groups)
      if (group.resident)
        fail(FSDP_INVALID_ARGUMENT, "fsdp_seal_model: group '{}' is RESIDENT, but FSDP_SCHEDULE_INTERLEAVED keeps forward and "
                                    "backward weights apart; drop the flag or choose another schedule", group.name);
  auto plan = std::make_unique<memory::ModelPlan>(memory::plan_model(spec_));
  if (context_->debug())
    if (const std::string broken = validate(*plan, spec_); !broken.empty())
      fail(FSDP_INTERNAL, "fsdp_seal_model: the plan is wrong: {}", broken);
  return plan;
}

// A rank whose plan fails (a schedule that names no group, say) still meets the others, so that they do not wait for it.
void Model::seal_running() {
  const trace::Span span(context_->timeline(), trace::Kind::call, "seal_model");
  Teams teams = create_teams(*context_, spec_.mesh);
  comm::Team *const team = teams.all.get();
  std::unique_ptr<memory::ModelPlan> made;
  const auto unplanned = catch_error([&] { made = make_plan(); });
  verify_declarations(*team, spec_, unplanned ? memory::ModelPlan{} : *made);
  share_outcome(*team, unplanned);
  plan_ = std::move(made);
  create_axes(teams, *context_, spec_.mesh, spec_.communicates());
  const TeamMemory exchanges = team_memory(teams, *context_, spec_.mesh, spec_.communicates());
  plan_->message_bytes = exchanges.message_bytes;
  plan_->device_team_bytes = exchanges.device_bytes;
  runtime_ = std::make_unique<Runtime>(*context_, spec_, *plan_, arenas_, teams);
  share_outcome(*team, catch_error([&] {
    gatherer_ = std::make_unique<Gatherer>(*runtime_);
    reducer_ = std::make_unique<Reducer>(*runtime_);
    optimizer_ = std::make_unique<Optimizer>(*runtime_, optimizer_kind_ == FSDP_OPTIMIZER_ADAMW);
    params_ = std::make_unique<Params>(*runtime_);
    meetings_.resize(team->size() + 1);
  }));
  sealed_ = true;
  context_->log(FSDP_LOG_INFO, format_text("sealed a model of {} groups, {} elements, {} bytes on this rank",
                                           spec_.groups.size(), plan_->element_count,
                                           runtime_->storage->allocated_bytes()[0]));
}

const memory::ModelPlan &Model::plan(const char *call) const {
  if (!sealed_) fail(FSDP_INVALID_STATE, "{}: the model is not sealed; call fsdp_seal_model first", call);
  return *plan_;
}

Runtime &Model::runtime(const char *call) {
  plan(call);
  context_->require_world(call);
  if (prepared_.number) require_no_replay(call);
  return *runtime_;
}

std::string Model::unfinished() const {
  if (!runtime_) return {};
  if (!runtime_->step_failure.empty()) return "a step that failed and was not discarded";
  if (const std::string holds = gatherer_->list_holds(); !holds.empty()) return holds;
  for (const Group &group : runtime_->groups)
    if (group.grad.state != Contribution::State::idle || group.grad.given_count)
      if (!runtime_->window_open) return format_text("group '{}' has gradients of an unfinished step", group.name());
  return {};
}

void Model::get_memory(uint32_t rank, fsdp_memory &memory) const {
  const memory::ModelPlan &model_plan = plan("fsdp_get_memory");
  if (rank >= spec_.mesh.size())
    fail(FSDP_INVALID_ARGUMENT, "fsdp_get_memory: rank {} is outside [0, {})", rank, spec_.mesh.size());
  const auto bytes = model_plan.role_bytes(spec_.mesh.inner(rank), spec_.mesh.inner_size);
  std::copy(bytes.begin(), bytes.end(), memory.role_bytes);
  memory.gather_lower_bound_bytes = model_plan.gather_pool.lower_bound_bytes;
  memory.reduce_lower_bound_bytes = model_plan.grad_pool.lower_bound_bytes;
  memory.parameter_count = model_plan.element_count;
  memory.padding_count = model_plan.padding_count;
}

void Model::get_stats(fsdp_stats &stats) {
  const Runtime &state = runtime("fsdp_get_stats");
  const Stats &counted = state.stats;
  stats.version = state.version;
  stats.step = state.adamw_step;
  stats.gathers = counted.gathers;
  stats.reduces = counted.reduces;
  stats.all_gathers = counted.all_gathers;
  stats.reduce_scatters = counted.reduce_scatters;
  stats.all_reduces = counted.all_reduces;
  stats.gathered_bytes = counted.gathered_bytes;
  stats.reduced_bytes = counted.reduced_bytes;
  stats.prefetches = counted.prefetches;
  stats.dropped_prefetches = counted.dropped_prefetches;
  stats.gathered_groups = counted.gathered_groups;
  stats.peak_gathered_groups = counted.peak_gathered_groups;
  stats.pending_grad_groups = counted.pending_grads;
  stats.peak_pending_grad_groups = counted.peak_pending_grads;
  stats.gather_wait_ns = counted.gather_wait_ns;
  stats.reduce_wait_ns = counted.reduce_wait_ns;
  stats.peer_wait_ns = counted.peer_wait_ns;
  stats.wait_ns = counted.gather_wait_ns + counted.reduce_wait_ns + counted.peer_wait_ns;
  stats.reduce_scatter_bytes = counted.reduce_scatter_bytes;
  stats.all_reduce_bytes = counted.all_reduce_bytes;
  if (state.outer) {
    const OuterStats outer = state.outer->stats();
    stats.outer_all_reduces = outer.all_reduces;
    stats.outer_reduce_scatters = outer.reduce_scatters;
    stats.outer_all_gathers = outer.all_gathers;
    stats.outer_sent_bytes = outer.sent_bytes;
  }
  stats.allocations = context_->device().allocations();
  stats.gather_pool_bytes = plan_->gather_pool.size_bytes;
  stats.gather_lower_bound_bytes = plan_->gather_pool.lower_bound_bytes;
  stats.reduce_pool_bytes = plan_->grad_pool.size_bytes;
  stats.reduce_lower_bound_bytes = plan_->grad_pool.lower_bound_bytes;
  std::copy(state.storage->allocated_bytes().begin(), state.storage->allocated_bytes().end(), stats.allocated_bytes);
}

}  // namespace fsdp::engine
