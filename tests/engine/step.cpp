// SPDX-License-Identifier: Apache-2.0
// Forward, backward, update: what one rank does in a step.
#include <algorithm>
#include <numeric>

#include "../float_modes.h"
#include "device.h"
#include "harness.h"

namespace harness {
namespace {

void set_flush_to_zero(bool on) {
#if defined(FSDP_HAS_FLOAT_MODES)
  if (on) float_modes::set(float_modes::get() | float_modes::flush);
#else
  (void)on;
#endif
}

std::vector<float> look(Rank &rank, size_t g, size_t p, fsdp_phase phase, Outcome *outcome) {
  uint64_t address = 0;
  std::vector<float> values = rank.view(g, p, phase, &address);
  if (outcome) outcome->views.push_back({outcome->version, rank.setup.ordinal(g, p), phase, hash_of(values)});
  if (outcome && (phase == FSDP_FORWARD || phase == FSDP_BACKWARD)) outcome->addresses.push_back(address);
  return values;
}

void tell(const Rank &rank, size_t g, fsdp_phase phase, bool held) {
  if (rank.setup.visited) rank.setup.visited(rank, g, phase, held);
}

// A hold of a whole group, or of one of its pieces.
class Hold {
 public:
  static constexpr uint32_t whole = UINT32_MAX;

  Hold(Rank &rank, size_t g, uint32_t piece, fsdp_phase phase) : rank_(rank), g_(g), piece_(piece), phase_(phase) {
    if (piece == whole)
      FSDP(fsdp_unshard(rank.groups[g], phase, 0, stream()));
    else
      FSDP(fsdp_unshard_piece(rank.groups[g], piece, phase, 0, stream()));
  }
  void give_back() {
    tell(rank_, g_, phase_, true);
    if (piece_ == whole)
      FSDP(fsdp_reshard(rank_.groups[g_], phase_, 0, stream()));
    else
      FSDP(fsdp_reshard_piece(rank_.groups[g_], piece_, phase_, 0, stream()));
    tell(rank_, g_, phase_, false);
  }
  bool has(size_t p) const { return piece_ == whole || rank_.def(g_).params[p].piece == piece_; }

 private:
  Rank &rank_;
  size_t g_;
  uint32_t piece_;
  fsdp_phase phase_;
};

// What a visit of the group holds, one after the other.
std::vector<uint32_t> pieces_of(const Rank &rank, size_t g) {
  if (!rank.setup.by_piece) return {Hold::whole};
  std::vector<uint32_t> pieces(rank.def(g).pieces());
  std::iota(pieces.begin(), pieces.end(), 0u);
  return pieces;
}

void visit_forward(Rank &rank, size_t g, fsdp_phase phase, Outcome *outcome) {
  for (const uint32_t piece : pieces_of(rank, g)) {
    Hold hold(rank, g, piece, phase);
    for (size_t p = 0; p < rank.def(g).params.size(); ++p)
      if (hold.has(p)) look(rank, g, p, phase, outcome);
    hold.give_back();
  }
}

void give_grad(Rank &rank, size_t g, size_t p, const std::vector<float> &values) {
  const ParamDef &param = rank.def(g).params[p];
  if (rank.setup.put) {
    const Placed placed(values);
    FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, param.count(), 0, stream()));
    return;
  }
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream(), &grad, &accumulate));
  if (!accumulate) return store_elements(grad.data, grad.dtype, values);
  std::vector<float> sums = load_elements(grad.data, grad.dtype, grad.element_count);
  for (uint64_t i = 0; i < values.size(); ++i) sums[i] += values[i];
  store_elements(grad.data, grad.dtype, sums);
}

}  // namespace

void forward(Rank &rank, Outcome *outcome) {
  for (size_t g = 0; g < rank.groups.size(); ++g) visit_forward(rank, g, FSDP_FORWARD, outcome);
}

namespace {

void backward_param(Rank &rank, size_t g, size_t p, fsdp_phase phase, uint32_t step, uint32_t microbatch,
                    Outcome *outcome) {
  std::vector<float> values = look(rank, g, p, phase, outcome);
  if (rank.def(g).params[p].flags & FSDP_PARAM_FROZEN) return;
  const uint32_t ordinal = rank.setup.ordinal(g, p);
  for (uint64_t e = 0; e < values.size(); ++e) values[e] = gradient(rank.rank, step, microbatch, ordinal, e, values[e]);
  give_grad(rank, g, p, values);
  if (rank.setup.complete) FSDP(fsdp_complete_grad(rank.groups[g], p, 0, stream()));
}

}  // namespace

// The made-up gradients depend on the weights. If BACKWARD cannot read them, they are held for a RECOMPUTE.
void backward_group(Rank &rank, size_t g, uint32_t step, uint32_t microbatch, Outcome *outcome) {
  const Scenario &setup = rank.setup;
  const bool has_weights = rank.def(g).options.backward_weights != FSDP_BACKWARD_WEIGHTS_NONE;
  const fsdp_phase phase = has_weights ? FSDP_BACKWARD : FSDP_RECOMPUTE;
  std::vector<uint32_t> pieces = pieces_of(rank, g);
  std::ranges::reverse(pieces);
  for (const uint32_t piece : pieces) {
    Hold hold(rank, g, piece, phase);
    if (setup.recompute && !setup.by_piece) visit_forward(rank, g, FSDP_RECOMPUTE, outcome);
    const size_t count = rank.def(g).params.size();
    for (size_t i = 0; i < count; ++i) {
      const size_t p = setup.complete ? count - 1 - i : i;
      if (hold.has(p)) backward_param(rank, g, p, phase, step, microbatch, outcome);
    }
    hold.give_back();
  }
  const bool last = microbatch + 1 == setup.microbatches && !setup.ends_late;
  FSDP(fsdp_reduce_grad(rank.groups[g], last ? FSDP_LAST : 0, stream()));
}

void backward(Rank &rank, uint32_t step, uint32_t microbatch, Outcome *outcome) {
  for (size_t g = rank.groups.size(); g-- > 0;) backward_group(rank, g, step, microbatch, outcome);
}

namespace {

// Main grads in a file have no addresses, so they are read by a call of all ranks.
void collect_grads(Rank &rank, Outcome &outcome) {
  const Scenario &setup = rank.setup;
  const bool in_file = setup.model.grad_home == FSDP_HOME_FILE;
  outcome.grads.clear();
  outcome.owned.clear();
  for (size_t g = 0; g < setup.groups.size(); ++g)
    for (size_t p = 0; p < setup.groups[g].params.size(); ++p) {
      const ParamDef &param = setup.groups[g].params[p];
      std::vector<float> &grad = outcome.grads.emplace_back(param.count(), 0.0f);
      outcome.owned.emplace_back(param.count(), uint8_t{0});
      if (in_file && !(param.flags & FSDP_PARAM_FROZEN))
        FSDP(fsdp_read_grad(rank.groups[g], p, grad.data(), FSDP_FLOAT32, grad.size(), FSDP_EVERY_RANK, 0));
    }
  for (const fsdp_shard &shard : rank.shards()) {
    const size_t g = static_cast<size_t>(std::ranges::find(rank.groups, shard.group) - rank.groups.begin());
    const uint32_t ordinal = setup.ordinal(g, shard.param_index);
    if (!in_file)
      copy_out(outcome.grads[ordinal].data() + shard.element_offset, shard.main_grad,
               shard.element_count * sizeof(float));
    std::fill_n(outcome.owned[ordinal].data() + shard.element_offset, shard.element_count, uint8_t{1});
  }
}

}  // namespace

void finish_step(Rank &rank, uint32_t step) {
  forward(rank, nullptr);
  backward(rank, step, 0, nullptr);
  FSDP(fsdp_finish_grads(rank.model, rank.setup.scale, rank.setup.ends_late ? FSDP_LAST : 0, stream()));
}

namespace {

void store_own(const Rank &rank, const fsdp_shard &shard, const std::vector<float> &weights) {
  if (shard.main_weight_dtype == FSDP_FLOAT32) return store_elements(shard.main_weight, FSDP_FLOAT32, weights);
  const Placed placed(weights);
  const Stats stats = rank.stats();
  const uint64_t step = rank.setup.model.optimizer == FSDP_OPTIMIZER_CALLER ? stats.version : stats.step + 1;
  FSDP(fsdp_round_stochastic(shard.group, shard.param_index, shard.element_offset,
                             static_cast<const float *>(placed.data()), shard.main_weight, weights.size(), step,
                             stream()));
}

// SGD with momentum on a shard, or on a chunk of one.
void update_part(const Rank &rank, const fsdp_shard &part, const fsdp_tensor &state) {
  const std::vector<float> grad = load_elements(part.main_grad, FSDP_FLOAT32, part.element_count);
  std::vector<float> momentum = load_elements(state.data, FSDP_FLOAT32, state.element_count);
  std::vector<float> weights = load_elements(part.main_weight, part.main_weight_dtype, part.element_count);
  for (uint64_t i = 0; i < part.element_count; ++i) {
    momentum[i] = 0.9f * momentum[i] + grad[i];
    weights[i] -= 0.01f * momentum[i];
  }
  store_elements(state.data, FSDP_FLOAT32, momentum);
  store_own(rank, part, weights);
}

}  // namespace

void update_chunks(const Rank &rank) {
  fsdp_shard chunk = FSDP_SHARD_INIT;
  while (FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk)), chunk.element_count) {
    fsdp_tensor state = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_shard_chunk_state(rank.model, "momentum", &state));
    update_part(rank, chunk, state);
  }
}

void update_own(Rank &rank) {
  const std::vector<fsdp_shard> shards = rank.shards();
  for (uint64_t s = 0; s < shards.size(); ++s) {
    const fsdp_shard &shard = shards[s];
    fsdp_param param = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(shard.group, shard.param_index, &param));
    if (param.optimizer != FSDP_OPTIMIZER_CALLER || shard.flags & FSDP_PARAM_FROZEN) continue;
    fsdp_tensor state = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_shard_state(rank.model, s, "momentum", &state));
    // Shards with planes in a file come in chunks.
    if (state.data && shard.main_weight && shard.main_grad) update_part(rank, shard, state);
  }
  update_chunks(rank);
}

void update(Rank &rank) {
  const auto is_own = [](const ParamDef &param) { return param.by_caller(); };
  if (std::ranges::any_of(rank.setup.groups,
                          [&](const auto &group) { return std::ranges::any_of(group.params, is_own); }))
    update_own(rank);
  if (rank.setup.model.optimizer == FSDP_OPTIMIZER_CALLER) return FSDP(fsdp_publish_weights(rank.model, stream()));
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  adamw.weight_decay = rank.setup.weight_decay;
  FSDP(fsdp_step_adamw(rank.model, 0.01, &adamw, stream()));
}

void clean_step(Rank &rank, uint32_t step) {
  finish_step(rank, step);
  update(rank);
}

void put_all(Rank &rank, size_t g, float value) {
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    const std::vector<float> grad(rank.def(g).params[p].count(), value);
    const Placed placed(grad);
    FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, grad.size(), 0, stream()));
  }
}

void reduce_all(Rank &rank, float value) {
  for (size_t g = rank.groups.size(); g-- > 0;) {
    put_all(rank, g, value);
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
  }
}

fsdp_mesh *make_mesh(fsdp_context *context, const std::vector<uint32_t> &ranks) {
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.ranks = ranks.data();
  options.rank_count = static_cast<uint32_t>(ranks.size());
  fsdp_mesh *mesh = nullptr;
  FSDP(fsdp_create_mesh(context, &options, &mesh));
  return mesh;
}

void train(Rank &rank, Outcome &outcome) {
  const Scenario &setup = rank.setup;
  set_flush_to_zero(setup.flush_to_zero);
  rank.load();
  outcome.version = 1;
  for (uint32_t step = 0; step < setup.steps; ++step) {
    for (uint32_t m = 0; m < setup.microbatches; ++m) {
      forward(rank, &outcome);
      backward(rank, step, m, &outcome);
    }
    FSDP(fsdp_finish_grads(rank.model, setup.scale, setup.ends_late ? FSDP_LAST : 0, stream()));
    double norm = 0;
    if (setup.clip > 0)
      FSDP(fsdp_clip_grads(rank.model, nullptr, setup.clip, stream(), &norm));
    else
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
    outcome.norms.push_back(norm);
    if (step + 1 == setup.steps) collect_grads(rank, outcome);
    update(rank);
    ++outcome.version;
    if (setup.eval)
      for (size_t g = 0; g < rank.groups.size(); ++g) visit_forward(rank, g, FSDP_EVAL, &outcome);
  }
  outcome.stats = rank.stats();
  outcome.memory = memory_of(rank.model, rank.rank);
  FSDP(fsdp_check_replicas(rank.model, 0, stream()));
  outcome.weights = rank.read_all();
}

}  // namespace harness
