// SPDX-License-Identifier: Apache-2.0
#include "engine/declaration.h"

#include <utility>

namespace fsdp::engine {
namespace {

// Weights that are released must be gone: nothing is gathered ahead, and a world of one gathers as others do.
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
  if (adamw()) spec_.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
  spec_.host_memory = context.device_traits().host_memory;
  if (context.debug()) set_debug(spec_);
  plan_exchanges();
  const transport::CollectiveTraits &traits = transport::traits_of(context.transport());
  spec_.rounds_before_sending = traits.rounds_before_sending;
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

void Declaration::add_group(memory::GroupSpec group) {
  require_unsealed("fsdp_create_group");
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
  param_names_.merge(names);
  group_names_.insert(group.name);
  const uint64_t longest = group.longest_call();
  spec_.groups.push_back(std::move(group));
  if (longest <= longest_call_) return;
  longest_call_ = longest;
  plan_exchanges();
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
  if (adamw() && state.name == "step")
    fail(FSDP_INVALID_ARGUMENT,
         "{}: 'step' is what checkpoints call the number of steps of FSDP_OPTIMIZER_ADAMW; give the state another name",
         call);
  for (const auto &known : spec_.states)
    if (known.name == state.name)
      fail(FSDP_INVALID_ARGUMENT, "{}: the model has a state '{}' already{}", call, state.name,
           adamw() && &known < spec_.states.data() + 2 ? ", which FSDP_OPTIMIZER_ADAMW brings" : "");
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

std::vector<std::string> Declaration::list_violations(uint32_t rank, const char *call) const {
  require_unsealed(call);
  if (spec_.groups.empty()) return {"the model has no group; call fsdp_create_group first"};
  auto violations = memory::find_violations(spec_);
  if (!violations.empty()) return violations;
  memory::ModelPlan planned;
  if (const auto unplanned = capture_error([&] { planned = memory::plan_model(spec_); })) return {unplanned->message};
  const auto needed = planned.role_bytes(spec_.mesh.inner(spec_.mesh.index_of(rank, call)), spec_.mesh.inner_size);
  for (const auto &[role, arena] : arenas_)
    if (arena.size_bytes < needed[role])
      violations.push_back(format_text("fsdp_set_arena: the arena for role {} has {} bytes, the model needs {}", role,
                                       arena.size_bytes, needed[role]));
  if (arenas_.contains(FSDP_ROLE_GRAD) && planned.region(memory::RegionId::kept_grads).bytes)
    violations.emplace_back(grad_arena_refusal);
  return violations;
}

}  // namespace fsdp::engine
