// SPDX-License-Identifier: Apache-2.0
// Forward, backward, update: what one rank does in a step.
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <algorithm>

#include "device.h"
#include "harness.h"

namespace harness {
namespace {

void set_flush_to_zero(bool on) {
#if defined(__SSE2__)
  if (on) _mm_setcsr(_mm_getcsr() | 0x8040);
#else
  (void)on;
#endif
}

void visit_forward(Rank &rank, size_t g, fsdp_phase phase, Outcome *outcome) {
  FSDP(fsdp_unshard(rank.groups[g], phase, stream()));
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    uint64_t address = 0;
    rank.view(g, p, phase, &address);
    if (outcome) outcome->addresses.push_back(address);
  }
  FSDP(fsdp_reshard(rank.groups[g], phase, stream()));
}

void give_grad(Rank &rank, size_t g, size_t p, const std::vector<float> &values) {
  const ParamDef &param = rank.def(g).params[p];
  if (rank.setup.put) {
    const Placed placed(values);
    FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, param.count(), stream()));
    return;
  }
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[g], p, stream(), &grad, &accumulate));
  if (!accumulate) return store_elements(grad.data, grad.dtype, values);
  std::vector<float> sums = load_elements(grad.data, grad.dtype, grad.element_count);
  for (uint64_t i = 0; i < values.size(); ++i) sums[i] += values[i];
  store_elements(grad.data, grad.dtype, sums);
}

}  // namespace

void forward(Rank &rank, Outcome *outcome) {
  for (size_t g = 0; g < rank.groups.size(); ++g) visit_forward(rank, g, FSDP_FORWARD, outcome);
}

void backward_group(Rank &rank, size_t g, uint32_t step, uint32_t microbatch, Outcome *outcome) {
  const Scenario &setup = rank.setup;
  FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, stream()));
  if (setup.recompute) visit_forward(rank, g, FSDP_RECOMPUTE, nullptr);
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    if (rank.def(g).params[p].flags & FSDP_PARAM_FROZEN) continue;
    uint64_t address = 0;
    std::vector<float> values = rank.view(g, p, FSDP_BACKWARD, &address);
    if (outcome) outcome->addresses.push_back(address);
    const uint32_t ordinal = setup.ordinal(g, p);
    for (uint64_t i = 0; i < values.size(); ++i)
      values[i] = gradient(rank.rank, step, microbatch, ordinal, i, values[i]);
    give_grad(rank, g, p, values);
  }
  FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, stream()));
  FSDP(fsdp_reduce_grad(rank.groups[g], microbatch + 1 == setup.microbatches ? FSDP_LAST : 0, stream()));
}

void backward(Rank &rank, uint32_t step, uint32_t microbatch, Outcome *outcome) {
  for (size_t g = rank.groups.size(); g-- > 0;) backward_group(rank, g, step, microbatch, outcome);
}

namespace {

void collect_grads(Rank &rank, Outcome &outcome) {
  const Scenario &setup = rank.setup;
  outcome.grads.clear();
  for (const GroupDef &def : setup.groups)
    for (const ParamDef &param : def.params) outcome.grads.emplace_back(param.count(), 0.0f);
  for (const fsdp_shard &shard : rank.shards()) {
    const size_t g = static_cast<size_t>(std::ranges::find(rank.groups, shard.group) - rank.groups.begin());
    copy(outcome.grads[setup.ordinal(g, shard.param_index)].data() + shard.element_offset, shard.main_grad,
         shard.element_count * sizeof(float));
  }
}

}  // namespace

void finish_step(Rank &rank, uint32_t step) {
  forward(rank, nullptr);
  backward(rank, step, 0, nullptr);
  FSDP(fsdp_finish_grads(rank.model, rank.setup.scale, stream()));
}

void update(Rank &rank) {
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
    FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, grad.size(), stream()));
  }
}

void train(Rank &rank, Outcome &outcome) {
  const Scenario &setup = rank.setup;
  set_flush_to_zero(setup.flush_to_zero);
  rank.load();
  for (uint32_t step = 0; step < setup.steps; ++step) {
    for (uint32_t m = 0; m < setup.microbatches; ++m) {
      forward(rank, &outcome);
      backward(rank, step, m, &outcome);
    }
    FSDP(fsdp_finish_grads(rank.model, setup.scale, stream()));
    double norm = 0;
    if (setup.clip > 0)
      FSDP(fsdp_clip_grads(rank.model, setup.clip, stream(), &norm));
    else
      FSDP(fsdp_get_grad_norm(rank.model, stream(), &norm));
    outcome.norms.push_back(norm);
    if (step + 1 == setup.steps) collect_grads(rank, outcome);
    update(rank);
    if (setup.eval)
      for (size_t g = 0; g < rank.groups.size(); ++g) visit_forward(rank, g, FSDP_EVAL, nullptr);
  }
  outcome.stats = rank.stats();
  FSDP(fsdp_get_memory(rank.model, rank.mesh_rank(), &outcome.memory));
  outcome.weights = rank.read_all();
}

}  // namespace harness
