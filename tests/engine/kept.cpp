// SPDX-License-Identifier: Apache-2.0
#include "kept.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "device.h"

namespace harness::kept {
namespace {

bool is_frozen(const Rank &rank, size_t g, size_t p) { return rank.def(g).params[p].flags & FSDP_PARAM_FROZEN; }

template <class Visit>
void for_each_param(const Rank &rank, Visit &&visit) {
  for (size_t g = 0; g < rank.groups.size(); ++g)
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) visit(g, p, rank.setup.ordinal(g, p));
}

Values read_states(const Rank &rank, const char *name) {
  Values states;
  for_each_param(rank, [&](size_t g, size_t p, uint32_t) {
    std::vector<float> values(is_frozen(rank, g, p) ? 0 : rank.def(g).params[p].count());
    if (!values.empty())
      FSDP(fsdp_read_state(rank.groups[g], p, name, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    states.push_back(std::move(values));
  });
  return states;
}

struct State {
  explicit State(const Rank &rank)
      : weights(rank.read_all()), averages(read_states(rank, "exp_avg")), squares(read_states(rank, "exp_avg_sq")) {}
  Values weights, averages, squares;
};

void load_state(Rank &rank, size_t g, size_t p, const char *name, const std::vector<float> &values) {
  FSDP(fsdp_load_state(rank.groups[g], p, name, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
}

void restore(Rank &rank, uint32_t step, const Keeps &keeps, const State &before) {
  FSDP(fsdp_begin_update(rank.model, stream()));
  for_each_param(rank, [&](size_t g, size_t p, uint32_t ordinal) {
    if (is_frozen(rank, g, p) || !keeps(step, ordinal)) return;
    const std::vector<float> &weights = before.weights[ordinal];
    FSDP(fsdp_load_param(rank.groups[g], p, weights.data(), FSDP_FLOAT32, weights.size(), FSDP_EVERY_RANK, 0));
    load_state(rank, g, p, "exp_avg", before.averages[ordinal]);
    load_state(rank, g, p, "exp_avg_sq", before.squares[ordinal]);
  });
  FSDP(fsdp_publish_weights(rank.model, stream()));
}

// Gradients that depend on the weights that are seen.
void give(Rank &rank, size_t g, size_t p, uint32_t step, uint32_t microbatch) {
  std::vector<float> values = rank.view(g, p, FSDP_BACKWARD);
  for (uint64_t e = 0; e < values.size(); ++e)
    values[e] = gradient(rank.rank, step, microbatch, rank.setup.ordinal(g, p), e, values[e]);
  const Placed placed(values);
  FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, values.size(), 0, stream()));
}

void backward_of(Rank &rank, size_t g, uint32_t step, uint32_t microbatch, Way way, const Keeps &keeps) {
  FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, stream()));
  bool any = false;
  for (size_t p = rank.def(g).params.size(); p-- > 0;) {
    if (is_frozen(rank, g, p)) continue;
    const bool kept = keeps(step, rank.setup.ordinal(g, p));
    if (kept && way == Way::untrained) continue;
    any = true;
    if (kept)
      FSDP(fsdp_put_grad(rank.groups[g], p, nullptr, 0, 0, 0, stream()));
    else
      give(rank, g, p, step, microbatch);
    if (rank.setup.complete) FSDP(fsdp_complete_grad(rank.groups[g], p, 0, stream()));
  }
  FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, stream()));
  // Where nothing is trained the call may be made, and does nothing.
  if (any || step % 2)
    FSDP(fsdp_reduce_grad(rank.groups[g], microbatch + 1 == rank.setup.microbatches ? FSDP_LAST : 0, stream()));
}

Values main_grads(const Rank &rank) {
  Values grads;
  for_each_param(rank, [&](size_t g, size_t p, uint32_t) { grads.emplace_back(rank.def(g).params[p].count(), 0.0f); });
  for (const fsdp_shard &shard : rank.shards()) {
    const auto g = static_cast<size_t>(std::ranges::find(rank.groups, shard.group) - rank.groups.begin());
    copy_out(grads[rank.setup.ordinal(g, shard.param_index)].data() + shard.element_offset, shard.main_grad,
             shard.element_count * sizeof(float));
  }
  return grads;
}

std::vector<double> measure(const Rank &rank) {
  std::vector<double> norms(1);
  if (rank.setup.clip > 0)
    FSDP(fsdp_clip_grads(rank.model, nullptr, rank.setup.clip, stream(), norms.data()));
  else
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), norms.data()));
  size_t count = 0;
  for (const GroupDef &group : rank.setup.groups) count += group.params.size();
  norms.resize(1 + count);
  FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms.data() + 1, count));
  int32_t found = 1;
  FSDP(fsdp_check_grads(rank.model, stream(), &found, nullptr));
  REQUIRE(found == 0);
  return norms;
}

void set_trained(Rank &rank, uint32_t step, const Keeps &keeps) {
  for_each_param(rank, [&](size_t g, size_t p, uint32_t ordinal) {
    if (!is_frozen(rank, g, p)) FSDP(fsdp_set_param_trainable(rank.groups[g], p, !keeps(step, ordinal)));
  });
}

void check_flags(const Rank &rank, uint32_t step, Way way, const Keeps &keeps, bool in_window) {
  for (const fsdp_shard &shard : rank.shards()) {
    const auto g = static_cast<size_t>(std::ranges::find(rank.groups, shard.group) - rank.groups.begin());
    const bool kept = keeps(step, rank.setup.ordinal(g, shard.param_index));
    const bool shown = kept && (way == Way::untrained || (way == Way::skipped && in_window));
    REQUIRE(!!(shard.flags & FSDP_PARAM_FROZEN) == shown);
  }
}

void step_kept(Rank &rank, uint32_t step, Way way, const Keeps &keeps, KeptTraining &training) {
  forward(rank, nullptr);
  for (uint32_t m = 0; m < rank.setup.microbatches; ++m)
    for (size_t g = rank.groups.size(); g-- > 0;) backward_of(rank, g, step, m, way, keeps);
  check_flags(rank, step, way, keeps, false);
  FSDP(fsdp_finish_grads(rank.model, rank.setup.scale, 0, stream()));
  check_flags(rank, step, way, keeps, true);
  training.norms.push_back(measure(rank));
  training.grads.push_back(main_grads(rank));
  update(rank);
  check_flags(rank, step, way, keeps, false);
}

}  // namespace
}  // namespace harness::kept

namespace harness {

std::vector<KeptTraining> train_kept(Scenario setup, Way way, const Keeps &keeps) {
  if (way == Way::skipped)
    for (GroupDef &group : setup.groups)
      for (ParamDef &param : group.params) param.missing_grad = FSDP_MISSING_GRAD_SKIP;
  std::vector<KeptTraining> trainings(setup.ranks);
  std::vector<std::string> errors;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    KeptTraining &training = trainings[r];
    for (uint32_t step = 0; step < setup.steps; ++step) {
      const kept::State before(rank);
      if (way == Way::untrained) kept::set_trained(rank, step, keeps);
      kept::step_kept(rank, step, way, keeps, training);
      training.stats.push_back(rank.stats());
      if (way == Way::restored) kept::restore(rank, step, keeps, before);
      kept::State after(rank);
      training.weights.push_back(std::move(after.weights));
      training.averages.push_back(std::move(after.averages));
      training.squares.push_back(std::move(after.squares));
    }
    FSDP(fsdp_close_context(context));
  });
  return trainings;
}

std::string kept_difference(const Scenario &setup, const std::vector<KeptTraining> &found,
                            const std::vector<KeptTraining> &expected, const Keeps &keeps) {
  for (size_t r = 0; r < found.size(); ++r)
    for (uint32_t s = 0; s < setup.steps; ++s) {
      const std::string at = "rank " + std::to_string(r) + ", step " + std::to_string(s);
      if (!same_bits(found[r].weights[s], expected[r].weights[s])) return at + ": weights";
      if (!same_bits(found[r].averages[s], expected[r].averages[s])) return at + ": exp_avg";
      if (!same_bits(found[r].squares[s], expected[r].squares[s])) return at + ": exp_avg_sq";
      if (!same_bits(found[r].grads[s], expected[r].grads[s])) return at + ": main grads";
      if (found[r].norms[s] != expected[r].norms[s]) return at + ": norms";
      for (size_t p = 0; p < found[r].weights[s].size() && s > 0; ++p)
        if (keeps(s, static_cast<uint32_t>(p)) &&
            hash_of(found[r].weights[s][p]) != hash_of(found[r].weights[s - 1][p]))
          return at + ": a weight has moved";
    }
  return {};
}

namespace {

Scenario kept_mesh(const Scenario &plain, uint32_t outer, uint32_t inner, bool hosts, fsdp_outer_strategy strategy) {
  Scenario setup = plain;
  setup.ranks = outer * inner;
  if (hosts) {
    setup.context.ranks_per_host = inner;
  } else {
    setup.mesh.replicate_size = outer;
    setup.mesh.shard_size = inner;
  }
  setup.model.outer_strategy = strategy;
  return setup;
}

void add_kept_meshes(std::vector<KeptSetup> &setups, const std::string &name, const Scenario &plain) {
  for (const uint32_t ranks : {1u, 2u, 3u}) {
    setups.push_back({name + ", " + std::to_string(ranks) + " ranks", plain});
    setups.back().scenario.ranks = ranks;
  }
  setups.push_back({name + ", HSDP", kept_mesh(plain, 2, 2, false, 0)});
  setups.push_back({name + ", HFSDP", kept_mesh(plain, 2, 2, false, FSDP_OUTER_OPTIM)});
  setups.push_back({name + ", two hosts", kept_mesh(plain, 2, 2, true, 0)});
  setups.push_back({name + ", two hosts of a rank each", kept_mesh(plain, 2, 1, true, 0)});
}

}  // namespace

std::vector<KeptSetup> kept_setups() {
  std::vector<KeptSetup> setups;
  unsigned turn = 0;
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST})
      for (const bool parts : {false, true}) {
        if (strategy == FSDP_STRATEGY_OPTIM && policy == FSDP_REDUCE_POLICY_EACH) continue;
        if (parts && policy == FSDP_REDUCE_POLICY_LAST) continue;
        Scenario plain = scenario_of(strategy, 1, turn % 2 ? FSDP_UNSHARD_MAPPED : FSDP_UNSHARD_COPIED);
        plain.context.timeout_ms = 60'000;
        plain.model.reduce_policy = policy;
        plain.steps = 6;
        plain.microbatches = 2;
        plain.weight_decay = 0.1;
        plain.clip = turn % 3 ? 0.5 : 0;
        plain.scale = turn % 2 ? 0.5 : 1;
        if (turn % 4 == 1) plain.context.flags = FSDP_CONTEXT_DEBUG;
        if (turn % 4 == 2) plain.context.flags = FSDP_CONTEXT_NO_OVERLAP;
        if (turn % 3 == 1) plain.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
        plain.groups[1].params[1].flags |= FSDP_PARAM_FROZEN;
        plain.groups[2].params[0].dtype = FSDP_BFLOAT16;
        if (parts) plain.model.max_pending_bytes = 16'384, plain.complete = true;
        ++turn;
        add_kept_meshes(
            setups,
            "strategy " + std::to_string(strategy) + ", policy " + std::to_string(policy) + (parts ? ", parts" : ""),
            plain);
      }
  return setups;
}

void expect_as_restored(Way way, const Keeps &keeps) {
  Sample sample(5);
  for (const KeptSetup &setup : kept_setups()) {
    if (!sample.takes_next()) continue;
    SCOPED_TRACE(setup.name);
    const auto expected = train_kept(setup.scenario, Way::restored, keeps);
    const auto found = train_kept(setup.scenario, way, keeps);
    EXPECT_EQ(kept_difference(setup.scenario, found, expected, keeps), "");
  }
}

}  // namespace harness
