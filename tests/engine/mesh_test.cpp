// SPDX-License-Identifier: Apache-2.0
// Meshes of two axes on one host: HSDP, HFSDP, and a shard axis over pretended hosts, against the reference, against
// each other in bits, and their counts.
#include <gtest/gtest.h>

#include "harness.h"

using namespace harness;

namespace {

enum class Kind { hsdp, hfsdp, hosts };

struct Case {
  Kind kind;
  uint32_t outer, inner;
};

std::ostream &operator<<(std::ostream &out, const Case &c) {
  return out << (c.kind == Kind::hsdp    ? "hsdp"
                 : c.kind == Kind::hfsdp ? "hfsdp"
                                         : "hosts")
             << c.outer << 'x' << c.inner;
}

constexpr Case cases[] = {{Kind::hsdp, 2, 1},  {Kind::hsdp, 2, 2},  {Kind::hsdp, 4, 2},  {Kind::hsdp, 3, 1},
                          {Kind::hfsdp, 2, 1}, {Kind::hfsdp, 2, 2}, {Kind::hfsdp, 2, 3}, {Kind::hfsdp, 4, 2},
                          {Kind::hosts, 2, 1}, {Kind::hosts, 2, 2}, {Kind::hosts, 4, 2}, {Kind::hosts, 3, 1}};

Scenario make_setup(const Case &c, fsdp_strategy strategy, uint32_t microbatches = 1,
                    fsdp_unshard_mode mode = FSDP_UNSHARD_MAPPED) {
  Scenario setup = scenario_of(strategy, c.outer * c.inner, mode);
  setup.microbatches = microbatches;
  if (c.kind == Kind::hosts) {
    setup.context.ranks_per_host = c.inner;
  } else {
    setup.mesh.replicate_size = c.outer;
    setup.mesh.shard_size = c.inner;
  }
  if (c.kind == Kind::hfsdp) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  return setup;
}

using MeshParam = std::tuple<Case, int, uint32_t, int>;
class Meshes : public testing::TestWithParam<MeshParam> {
 protected:
  Scenario setup() const {
    const auto [c, strategy, microbatches, mode] = GetParam();
    return make_setup(c, strategy, microbatches, mode);
  }
};

// What every rank reads, sums and stores.
TEST_P(Meshes, HaveTheReferencesBits) {
  Scenario scenario = setup();
  scenario.steps = 4;
  scenario.clip = 0.5;
  scenario.eval = scenario.recompute = scenario.microbatches > 1;
  const auto outcomes = train_threads(scenario);
  EXPECT_EQ(difference(scenario, outcomes), "");
  for (const Outcome &outcome : outcomes) EXPECT_EQ(outcome.norms, outcomes[0].norms);
}

std::vector<MeshParam> mesh_params() {
  std::vector<MeshParam> params;
  Sample sample(5);
  for (const Case &c : cases)
    for (const int strategy : {1, 2, 3, 4})
      for (const uint32_t microbatches : {1u, 3u})
        for (const int mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
          if (sample.takes_next()) params.emplace_back(c, strategy, microbatches, mode);
  return params;
}

INSTANTIATE_TEST_SUITE_P(All, Meshes, testing::ValuesIn(mesh_params()));

// The same blocks on one host: another implementation, the same additions.
TEST(ReductionBlocks, OnOneHostHaveTheBitsOfHosts) {
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const uint32_t microbatches : {1u, 3u}) {
      Scenario hosts = make_setup({Kind::hosts, 2, 2}, strategy, microbatches);
      hosts.clip = 0.5;
      Scenario blocks = hosts;
      blocks.context.ranks_per_host = 0;
      blocks.mesh.reduction_block_size = 2;
      const auto a = train_threads(hosts), b = train_threads(blocks);
      EXPECT_EQ(difference(hosts, a), "") << "strategy " << strategy << " k " << microbatches;
      EXPECT_EQ(difference(blocks, b), "") << "strategy " << strategy << " k " << microbatches;
      EXPECT_TRUE(same_bits(a[0].weights, b[0].weights)) << "strategy " << strategy << " k " << microbatches;
      EXPECT_EQ(a[0].norms, b[0].norms);
    }
}

// Shows that blocks do change bits, without which the test above could not fail.
TEST(ReductionBlocks, OtherBlocksHaveOtherBits) {
  Scenario blocks = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
  blocks.mesh.reduction_block_size = 2;
  Scenario plain = blocks;
  plain.mesh.reduction_block_size = 0;
  EXPECT_FALSE(same_bits(train_threads(blocks)[0].weights, train_threads(plain)[0].weights));
}

// Hosts of 2 and of 1 ranks: no shard axis of all three, but three replicas.
TEST(OuterAxis, ReplicasMayLieUnevenlyOnHosts) {
  Scenario setup = make_setup({Kind::hosts, 3, 1}, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  setup.context.ranks_per_host = 2;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    fsdp_mesh *mesh = nullptr;
    fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
    options.shard_size = 3;
    require_error(fsdp_create_mesh(context, &options, &mesh), FSDP_UNSUPPORTED, {"lies unevenly on its hosts"});
  });
  setup.mesh.replicate_size = 3;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

// Replicas meet only in the last reduce, which is the same on all of them, so only the end of the step shows that one
// replica had more micro-batches.
TEST(OuterAxis, ReplicasWithOtherMicrobatchesAreNamed) {
  Scenario setup = make_setup({Kind::hsdp, 2, 1}, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Scenario mine = setup;
    mine.microbatches = 1 + r;
    Rank rank(context, mine);
    rank.load();
    for (uint32_t m = 0; m < mine.microbatches; ++m) backward(rank, 0, m, nullptr);
    require_error(fsdp_finish_grads(rank.model, 1, 0, nullptr), FSDP_MISMATCH,
                  {"rank 1 reduced 8 contributions of groups in this step, rank 0 reduced 4", "fsdp_discard_step"});
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(OuterAxis, HfsdpHasTheBitsOfHsdp) {
  for (const uint32_t microbatches : {1u, 3u}) {
    const Scenario setups[] = {make_setup({Kind::hsdp, 2, 2}, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, microbatches),
                               make_setup({Kind::hfsdp, 2, 2}, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, microbatches)};
    const auto hsdp = train_threads(setups[0]), hfsdp = train_threads(setups[1]);
    EXPECT_EQ(difference(setups[0], hsdp), "");
    EXPECT_EQ(difference(setups[1], hfsdp), "");
    for (uint32_t r = 0; r < 4; ++r) EXPECT_TRUE(same_bits(hsdp[r].weights, hfsdp[r].weights)) << "rank " << r;
  }
}

TEST(OuterAxis, ProcessesOverlapAndDelaysChangeNoBit) {
  for (const Case &c : {Case{Kind::hsdp, 2, 2}, Case{Kind::hfsdp, 2, 2}, Case{Kind::hosts, 2, 2}}) {
    const Scenario setup = make_setup(c, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    EXPECT_EQ(difference(setup, train_processes(setup)), "") << c;
    Scenario other = setup;
    other.context.flags = FSDP_CONTEXT_NO_OVERLAP;
    EXPECT_EQ(difference(other, train_threads(other)), "") << c;
    other.context.flags = 0;
    other.context.debug_delay_us = 300;
    other.context.debug_delay_seed = 7;
    EXPECT_EQ(difference(other, train_threads(other)), "") << c;
  }
}

// n groups, k micro-batches: the counts that the documents promise.
TEST(OuterAxis, CountsCollectives) {
  const uint64_t n = odd_groups().size(), k = 3, steps = 2;
  for (const Case &c : {Case{Kind::hsdp, 2, 2}, Case{Kind::hfsdp, 2, 2}, Case{Kind::hosts, 2, 2}}) {
    Scenario setup = make_setup(c, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, k);
    setup.steps = steps;
    for (const Outcome &outcome : train_threads(setup)) {
      EXPECT_EQ(outcome.stats.reduce_scatters, n * k * steps) << c;
      EXPECT_EQ(outcome.stats.outer_all_reduces, c.kind == Kind::hsdp ? n * steps : 0) << c;
      EXPECT_EQ(outcome.stats.outer_reduce_scatters, c.kind == Kind::hsdp    ? 0
                                                     : c.kind == Kind::hfsdp ? n * steps
                                                                             : n * k * steps)
          << c;
      // The first publish, after loading, gathers too.
      EXPECT_EQ(outcome.stats.outer_all_gathers, c.kind == Kind::hsdp ? 0 : n * (steps + 1)) << c;
    }
  }
}

// In a reduce-scatter a rank sends all of its sums of a group once, except its own slice. In a gather it sends its
// slice of the weights to each other rank; an all-reduce also sends its slice of the sums in this way.
TEST(OuterAxis, CountsTheBytesThatAreSent) {
  const uint64_t rows = 64, columns = 128, k = 3, steps = 2, groups = 3;
  for (const uint64_t outer : {2u, 4u})
    for (const Kind kind : {Kind::hsdp, Kind::hfsdp, Kind::hosts}) {
      const Case c = {kind, static_cast<uint32_t>(outer), 2};
      Scenario setup = make_setup(c, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, k);
      setup.steps = steps;
      setup.groups = equal_groups(groups, rows, columns);
      setup.eval = true;  // the last gather has ended when its weights are read
      setup.set_dtype(FSDP_BFLOAT16);
      const uint64_t own = rows * columns / c.inner, others = outer - 1;  // elements of a group
      const uint64_t scatter = own / outer * others * sizeof(float);
      const uint64_t gather_sums = own / outer * others * sizeof(float), gather_weights = own / outer * others * 2;
      const uint64_t sent = kind == Kind::hsdp    ? steps * (scatter + gather_sums)
                            : kind == Kind::hfsdp ? steps * scatter + (steps + 1) * gather_weights
                                                  : steps * k * scatter + (steps + 1) * gather_weights;
      for (const Outcome &outcome : train_threads(setup)) EXPECT_EQ(outcome.stats.outer_sent_bytes, groups * sent) << c;
    }
}

// HFSDP: optim / (W M) + (grad + weight) / W, each rounded as the planner rounds.
TEST(OuterAxis, MemoryIsPlannedAndAllocated) {
  for (const Case &c :
       {Case{Kind::hsdp, 2, 2}, Case{Kind::hfsdp, 2, 2}, Case{Kind::hosts, 2, 2}, Case{Kind::hfsdp, 4, 2}}) {
    Scenario setup = make_setup(c, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
    setup.groups = equal_groups(3, 64, 128);  // divides by everything: no padding
    setup.set_dtype(FSDP_BFLOAT16);
    const uint64_t elements = 3 * 64 * 128;
    const uint64_t slots = c.kind == Kind::hsdp ? c.inner : c.inner * c.outer;
    const uint64_t grads = c.kind == Kind::hosts ? slots : c.inner;
    for (const Outcome &outcome : train_threads(setup)) {
      for (int role = 0; role <= last_role; ++role)
        EXPECT_EQ(outcome.memory.role_bytes[role], outcome.stats.allocated_bytes[role]) << c << " role " << role;
      EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_MAIN], elements * 4 / slots) << c;
      EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_OPTIMIZER], elements * 8 / slots) << c;
      EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_GRAD], elements * 4 / grads) << c;
      EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_COMPUTE], elements * 2 / c.inner) << c;
    }
  }
}

}  // namespace
