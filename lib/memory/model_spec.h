// SPDX-License-Identifier: Apache-2.0
// The caller's declaration, with defaults filled in: the input of every pure computation about a model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "fsdp.h"
#include "layout/flat_layout.h"
#include "layout/mesh.h"

namespace fsdp::memory {

struct ParamSpec {
  std::string name;
  std::vector<uint64_t> shape;
  // Set only if the parameter is a box of a larger tensor: the shape of that tensor, and the offset of the box in it.
  std::vector<uint64_t> global_shape, global_offset;
  uint64_t element_count = 1;
  fsdp_dtype dtype = FSDP_FLOAT32;
  uint32_t flags = 0;
  fsdp_granule granule = FSDP_GRANULE_ROW;
  uint64_t granule_rows = 0;
  uint32_t row_dimensions = 1;  // a row spans all dimensions but these first ones; a scalar has 1
  double lr_scale = 1.0;
  fsdp_quantization quantization = 0;  // 0: none
  fsdp_missing_grad missing_grad = FSDP_MISSING_GRAD_ZEROS;
  uint32_t piece = 0;  // number of the group's piece with which the parameter is gathered
  // The last two dimensions are divided into matrices with these numbers of rows; empty: the parameter has no matrices.
  std::vector<uint64_t> matrix_splits;
  bool trained = true;        // set by fsdp_set_param_trainable; without meaning for a frozen parameter
  bool coded_states = false;  // AdamW's states are codes of 8 bits (can_code_states() in memory/plane.h)
  // The optimizer that updates the parameter: FSDP_OPTIMIZER_ADAMW, also if its states are in codes, or
  // FSDP_OPTIMIZER_CALLER. 0: none, because the parameter is frozen. Before it is declared in a model, 0 means the
  // model's optimizer.
  fsdp_optimizer optimizer = 0;
  void *user_data = nullptr;

  bool is_box() const { return !global_shape.empty(); }
  uint64_t rows() const {
    uint64_t count = 1;
    for (size_t d = 0; d < shape.size() && d < row_dimensions; ++d) count *= shape[d];
    return count;
  }
  uint64_t row_size() const {
    uint64_t size = 1;
    for (size_t d = row_dimensions; d < shape.size(); ++d) size *= shape[d];
    return size;
  }
  bool frozen() const { return flags & FSDP_PARAM_FROZEN; }
  bool quantized() const { return quantization != 0; }
  bool has_gradient() const { return !frozen() && trained; }
  bool by_caller() const { return optimizer == FSDP_OPTIMIZER_CALLER; }
  // Does a step without a gradient leave the parameter unchanged?
  bool skips_missing() const { return !frozen() && missing_grad == FSDP_MISSING_GRAD_SKIP; }
};

// The members of a parameter that may differ between the meshes of its group.
struct ParamIdentity {
  std::string name;
  std::vector<uint64_t> global_shape, global_offset;  // empty: it is not a box

  bool operator==(const ParamIdentity &) const = default;
};

// A group as declared on one of its meshes.
struct GroupInstance {
  std::vector<uint32_t> ranks;        // ranks of the job, in the mesh's order
  std::vector<ParamIdentity> params;  // in the order of declaration
};

struct GroupSpec {
  std::string name;
  std::vector<ParamSpec> params;
  fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
  fsdp_reduce_policy reduce_policy = FSDP_REDUCE_POLICY_EACH;
  fsdp_dtype grad_dtype = 0;    // 0: each parameter's dtype
  fsdp_dtype reduce_dtype = 0;  // 0: the gradient's dtype
  bool resident = false;
  bool root = false;             // visited first and last in each direction
  bool backward_weights = true;  // can BACKWARD hold its weights?
  fsdp_main_storage main_storage = FSDP_MAIN_FLOAT32;
  uint32_t mesh = 0;         // index in ModelSpec::meshes
  fsdp_grad_op grad_op = 0;  // 0: the model's grad_op
  double grad_factor = 1.0;  // used only with FSDP_GRAD_OP_FACTOR in grad_op
  // The group on each of its meshes, in the order of their first ranks. Set at the seal; empty on the model's mesh.
  std::vector<GroupInstance> instances;
  // For each parameter, the instance whose ranks count it in norms and write it into checkpoints: the first instance
  // with this box. Set, or empty, together with `instances`.
  std::vector<uint32_t> counted_by;

  // An upper bound of the bytes in one call of a collective: the whole group in the widest dtype.
  uint64_t longest_call() const {
    constexpr uint64_t max_counted = uint64_t{1} << 40, widest = 8;
    uint64_t elements = 0;
    for (const auto &param : params)
      elements = std::min(elements + std::min(param.element_count, max_counted), max_counted);
    return elements * widest;
  }
  // Pieces are numbered from 0, and their numbers never decrease in the order of the parameters.
  uint32_t piece_count() const { return params.empty() ? 1 : params.back().piece + 1; }
  bool trainable() const {
    for (const auto &param : params)
      if (!param.frozen()) return true;
    return false;
  }
  // The instance whose ranks count the parameter; NULL: the group is on the model's mesh.
  const GroupInstance *counting(uint64_t param) const {
    return instances.empty() ? nullptr : &instances[counted_by[param]];
  }
  // Is any parameter of the group trained now?
  bool trained() const { return std::ranges::any_of(params, &ParamSpec::has_gradient); }
};

struct StateSpec {
  std::string name;
  fsdp_dtype dtype;       // dtype of the state; of AdamW's states: unless they are in codes
  bool by_adamw = false;  // is it one of AdamW's states?
};
// If AdamW is the model's optimizer, the first states of the model are AdamW's.
inline constexpr uint32_t adamw_states = 2;

// Where planes are kept while no work needs them, by what they store.
struct HomeSpec {
  fsdp_home state = FSDP_HOME_DEVICE, main = FSDP_HOME_DEVICE, grad = FSDP_HOME_DEVICE;
  std::string directory;    // for the file; may differ between ranks
  uint64_t turn_bytes = 0;  // most bytes of a segment that comes from the file at once
  uint32_t turns = 0;       // number of buffers for segments

  bool in_file() const { return state == FSDP_HOME_FILE || main == FSDP_HOME_FILE || grad == FSDP_HOME_FILE; }
};

struct ModelSpec {
  // First the model's mesh, then the other meshes of groups, each once, in the order in which groups first name them.
  std::vector<layout::Mesh> meshes{1};
  bool force_communication = false;
  // In debug mode buffers are never shared. Whole weights in host memory are shown in a separate view, whose access can
  // be taken away.
  bool debug = false;
  fsdp_unshard_mode unshard_mode = FSDP_UNSHARD_MAPPED;
  bool private_views = false;  // weights that are not copied are shown in a view whose writes stay in that view
  fsdp_grad_op grad_op = FSDP_GRAD_OP_MEAN;
  double grad_factor = 1.0;
  bool prefetches = true;       // prefetch automatically, and not only when the caller asks
  uint32_t prefetch_depth = 1;  // number of groups that may be gathered ahead at once
  uint64_t prefetch_bytes = 0;
  uint32_t max_pending_groups = 2;
  uint64_t max_pending_bytes = 0;  // limit for full gradients that take turns; 0: no limit
  fsdp_schedule_kind schedule = FSDP_SCHEDULE_SEQUENTIAL;
  uint32_t held_groups = 0;  // with FSDP_SCHEDULE_ANY: maximum of gathered buffers in use at once
  // For quantized parameters: how scales are rounded, and to which dtype numbers are rounded first.
  fsdp_scale_rounding scale_rounding = FSDP_SCALE_EXACT;
  fsdp_dtype quantize_from = FSDP_FLOAT32;
  fsdp_scale_rule scale_rule = FSDP_SCALE_ROUND_UP;
  fsdp_plane_policy plane_policy = FSDP_PLANES_BY_PHASE;
  uint64_t rounding_seed = 0;       // for main weights that are rounded stochastically
  uint64_t matrix_bytes = 0;        // limit in bytes of the matrices that one rank gets at once; 0: chosen by the plan
  uint64_t save_staging_bytes = 0;  // memory for saves; 0: each save allocates its own
  HomeSpec homes;
  uint64_t message_bytes = 0;  // a rank's memory for messages over the outer axis
  // Are compute weights and gradients in memory of the host, where its ranks can read each other's? If not, the next
  // four fields say how they are exchanged.
  bool host_memory = true;
  uint64_t device_team_bytes = 0;                // a rank's memory for exchanging weights and gradients
  fsdp_device_transport device_transport = 0;    // as declared
  bool rounds_gradients_before_sending = false;  // gradients are rounded to their reduce dtype in a separate buffer
  bool receives_slices = false;  // gradients of fewer than 32 bits are received in a buffer before they are summed
  std::vector<fsdp_visit> visits;
  std::vector<StateSpec> states;
  bool mixes_optimizers = false;  // AdamW updates some of its trainable parameters, and the caller updates others
  std::deque<GroupSpec> groups;   // a deque, because names that the caller has received must keep their addresses

  layout::Mesh &mesh() { return meshes.front(); }
  const layout::Mesh &mesh() const { return meshes.front(); }
  const layout::Mesh &mesh_of(const GroupSpec &group) const { return meshes[group.mesh]; }
  // AdamW's states belong to the parameters that AdamW updates. Other states belong to all trainable parameters, or
  // only to those that the caller updates if AdamW updates some.
  bool has_state(const ParamSpec &param, const StateSpec &state) const {
    if (param.frozen()) return false;
    return state.by_adamw ? !param.by_caller() : !mixes_optimizers || param.by_caller();
  }
  uint32_t state_count(const ParamSpec &param) const {
    const auto has = [&](const StateSpec &state) { return has_state(param, state); };
    return static_cast<uint32_t>(std::ranges::count_if(states, has));
  }
  // Do ranks communicate over the mesh's inner axis, whose ranks share memory?
  bool communicates(const layout::Mesh &of) const { return of.inner_size > 1 || force_communication; }
  // The factor by which the sum of a group's gradients is multiplied. A mean is over all ranks of the model, because a
  // rank's expert sees tokens of all ranks.
  float factor_of(const GroupSpec &group) const {
    switch (group.grad_op ? group.grad_op : grad_op) {
      case FSDP_GRAD_OP_SUM: return 1.0F;
      case FSDP_GRAD_OP_FACTOR: return static_cast<float>(group.grad_op ? group.grad_factor : grad_factor);
      default: return static_cast<float>(1.0 / mesh().size());
    }
  }
  // The number of ranks of an outer axis that exchange measured values. With one mesh, replicas measure the same
  // values, so only ranks with different slots exchange. With several meshes all ranks of the model do.
  uint32_t value_slices() const { return meshes.size() > 1 ? mesh().outer_size : mesh().slices(); }
  uint32_t value_count() const { return mesh().inner_size * value_slices(); }
  // The maximum of full gradients that are pending at once. Those of root groups are additional, because they stay for
  // a whole pass.
  uint32_t pending_groups() const {
    uint32_t count = max_pending_groups;
    for (const auto &group : groups) count += group.root && group.trainable() && count < UINT32_MAX;
    return count;
  }
  // An upper bound of the bytes that the longest call of a collective moves.
  uint64_t longest_call() const {
    uint64_t longest = 0;
    for (const auto &group : groups) longest = std::max(longest, group.longest_call());
    return longest;
  }
  // Are whole weights shown in a separate view, and not in the memory into which this rank writes them?
  bool shows_apart() const { return host_memory && (debug || private_views); }
  bool mapped(const layout::Mesh &of) const {
    return (unshard_mode == FSDP_UNSHARD_MAPPED && host_memory) || !communicates(of);
  }
};

}  // namespace fsdp::memory
