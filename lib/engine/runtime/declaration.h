// SPDX-License-Identifier: Apache-2.0
// The caller's declaration of a model. It may change until the seal; the plan is made from its final state.
#pragma once

#include <map>
#include <memory>
#include <memory_resource>
#include <string>
#include <unordered_set>
#include <vector>

#include "engine/context/context.h"
#include "engine/runtime/group_meshes.h"
#include "engine/runtime/storage.h"
#include "memory/model_plan.h"

namespace fsdp::engine {

// The values that a group gets if its own options are 0.
struct GroupDefaults {
  fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
  fsdp_dtype grad_dtype = 0;
  fsdp_dtype reduce_dtype = 0;
  fsdp_reduce_policy reduce_policy = 0;
  fsdp_main_storage main_storage = FSDP_MAIN_FLOAT32;
};

// The places of a rank of the job in the meshes of the model. Throws INVALID_ARGUMENT, which names the call, if a mesh
// lacks the rank.
std::pmr::vector<memory::InnerPlace> places_of(const memory::ModelSpec &spec, uint32_t rank, const char *call,
                                               std::pmr::memory_resource *memory = std::pmr::get_default_resource());

class Declaration {
 public:
  Declaration(const Context &context, memory::ModelSpec spec, fsdp_optimizer optimizer, GroupDefaults defaults);

  const memory::ModelSpec &spec() const { return spec_; }
  const GroupDefaults &defaults() const { return defaults_; }
  const std::map<fsdp_role, CallerArena> &arenas() const { return arenas_; }
  // Is the optimizer AdamW, with states in fp32 or in codes?
  bool adamw() const { return optimizer_ != FSDP_OPTIMIZER_CALLER; }
  bool codes_states() const { return optimizer_ == FSDP_OPTIMIZER_ADAMW_8BIT; }
  // Does AdamW count the model's steps? Not if the caller updates all parameters itself.
  bool counts_steps() const { return adamw() && (adamw_updates_ || !caller_updates_); }
  bool sealed() const { return sealed_; }
  void require_unsealed(const char *call) const;

  // Each of these throws INVALID_STATE once the model is sealed.
  void add_group(memory::GroupSpec group, layout::Mesh mesh);
  void set_schedule(fsdp_schedule_kind kind, std::vector<fsdp_visit> visits, uint32_t held_groups);
  void add_state(memory::StateSpec state);
  void set_arena(fsdp_role role, void *data, uint64_t size_bytes);
  // Lists the errors for which a seal would refuse this declaration on rank `rank` of the job.
  std::vector<std::string> list_violations(uint32_t rank, const char *call) const;
  // Called by the seal: throws the first violation.
  std::unique_ptr<memory::ModelPlan> make_plan() const;
  void seal() { sealed_ = true; }
  // The seal calls number_meshes_alike() before it plans, and learn_instances() after it has compared the
  // declarations. Both are collective over the model.
  void number_meshes_alike(transport::Team &team);
  void learn_instances(transport::Team &team) { engine::learn_instances(team, spec_); }
  // After the seal, only lr_scale and `trained` may change.
  memory::ParamSpec &param(uint32_t group, uint64_t param_index) { return spec_.groups[group].params[param_index]; }

 private:
  // Fills in the model's optimizer. Throws if the parameter names an optimizer that the model does not have.
  void set_optimizer(memory::ParamSpec &param, const std::string &group) const;
  // `own_mesh`: the group's mesh is not the model's mesh.
  void code_states(memory::ParamSpec &param, bool own_mesh) const;
  // Throws if the caller's own optimizer cannot work on main weights in this storage.
  void require_own_optimizer(fsdp_main_storage storage, const char *call) const;
  // Returns the mesh's index in the spec, and adds the mesh if it is new.
  uint32_t number_of(layout::Mesh mesh);
  // Plans the memory for exchanges, which depends on the largest group.
  void plan_exchanges();

  const Context &context_;
  memory::ModelSpec spec_;
  uint64_t longest_call_ = 0;  // longest call of a collective of its groups
  fsdp_optimizer optimizer_;
  GroupDefaults defaults_;
  std::unordered_set<std::string> param_names_, group_names_;
  std::map<fsdp_role, CallerArena> arenas_;
  bool adamw_updates_ = false, caller_updates_ = false;  // does the optimizer update any parameter?
  bool sealed_ = false;
};

// Compares the declarations of the team's ranks. Throws MISMATCH, which names the first difference. `model` is its
// number among the models that these ranks have sealed, as in the flight record. `mesh` is the number of the team's
// mesh. Names and boxes are compared only for groups on this mesh or the model's mesh.
void verify_declarations(transport::Team &team, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                         uint32_t model, uint32_t mesh = 0);

}  // namespace fsdp::engine
