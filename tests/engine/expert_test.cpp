// SPDX-License-Identifier: Apache-2.0
// Dense and expert parameters in one job: two models on meshes of their own. Ranks 0 and 2 hold one half of the
// experts, ranks 1 and 3 the other; an expert's gradient is summed over its two ranks and divided by the four dense
// ones.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <memory>

#include "expert_layers.h"
#include "harness.h"

using namespace harness;
using namespace expert_layers;

namespace {

constexpr uint32_t ranks = 4;

struct Expert {
  explicit Expert(uint32_t rank) : members{rank % 2, rank % 2 + 2} {
    setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
    setup.steps = 1;
    setup.mesh.ranks = members;
    setup.mesh.rank_count = 2;
    setup.mesh.shard_size = 2;
    setup.model.grad_op = FSDP_GRAD_OP_FACTOR;
    setup.model.grad_factor = 1.0 / ranks;
  }
  uint32_t members[2];
  Scenario setup;
};

std::vector<std::vector<float>> join(const std::vector<std::vector<float>> &a,
                                     const std::vector<std::vector<float>> &b) {
  auto whole = a;
  for (size_t p = 0; p < b.size(); ++p)
    for (size_t i = 0; i < b[p].size(); ++i)
      if (b[p][i] != 0) whole[p][i] = b[p][i];
  return whole;
}

std::vector<std::vector<float>> expected_grads(const Expert &expert) {
  std::vector<std::vector<float>> grads;
  for (const GroupDef &group : expert.setup.groups)
    for (const ParamDef &param : group.params) {
      const auto ordinal = static_cast<uint32_t>(grads.size());
      std::vector<float> grad(param.count());
      for (uint64_t i = 0; i < grad.size(); ++i) {
        const float seen = initial_weight(ordinal, i);
        grad[i] = (gradient(expert.members[0], 0, 0, ordinal, i, seen) +
                   gradient(expert.members[1], 0, 0, ordinal, i, seen)) *
                  (1.0f / ranks);
      }
      grads.push_back(std::move(grad));
    }
  return grads;
}

TEST(Experts, AreSummedOverTheirRanksAndDividedByTheDenseOnes) {
  Scenario dense = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
  dense.steps = 1;
  std::vector<Outcome> dense_outcomes(ranks), outcomes(ranks);
  run_threads(dense, [&](uint32_t r, fsdp_context *context) {
    const Expert expert(r);
    Rank both[] = {Rank(context, dense), Rank(context, expert.setup)};
    train(both[0], dense_outcomes[r]);
    train(both[1], outcomes[r]);
    FSDP(fsdp_close_context(context));
  });
  for (uint32_t r = 0; r < 2; ++r)
    EXPECT_TRUE(same_bits(join(outcomes[r].grads, outcomes[r + 2].grads), expected_grads(Expert(r))))
        << "experts of rank " << r;
  EXPECT_FALSE(same_bits(outcomes[0].weights, outcomes[1].weights)) << "other ranks, other experts";
  for (uint32_t r = 0; r < 2; ++r)
    EXPECT_TRUE(same_bits(outcomes[r].weights, outcomes[r + 2].weights))
        << "experts of ranks " << r << " and " << r + 2;
  EXPECT_EQ(difference(dense, dense_outcomes), "");
}

// -- dense and expert layers of one program, visited in turn --

constexpr uint32_t layer_count = 2, adamw_count = 2;

std::vector<GroupDef> layers_of(const std::string &kind, uint64_t rows) {
  std::vector<GroupDef> groups;
  for (uint32_t l = 0; l < layer_count; ++l) {
    const std::string name = kind + "." + std::to_string(l);
    groups.push_back({name, {{name + ".w", {rows, 4}}}});
  }
  return groups;
}

void read_layer(Rank &rank, size_t layer, fsdp_phase phase, uint32_t expected) {
  FSDP(fsdp_unshard(rank.groups[layer], phase, 0, nullptr));
  if (expected) REQUIRE(crc_of(rank.view(layer, 0, phase)) == expected);
  FSDP(fsdp_reshard(rank.groups[layer], phase, 0, nullptr));
}

void give_layer(Rank &rank, size_t layer, const std::vector<float> &grad) {
  FSDP(fsdp_put_grad(rank.groups[layer], 0, grad.data(), FSDP_FLOAT32, grad.size(), 0, nullptr));
  FSDP(fsdp_reduce_grad(rank.groups[layer], FSDP_LAST, nullptr));
}

// The sum of squares of a layer's main gradient over the ranks of the model. Both layers have the same.
double squares_of(Rank &rank) {
  std::vector<double> norms(layer_count);
  FSDP(fsdp_get_param_grad_norms(rank.model, nullptr, norms.data(), norms.size()));
  REQUIRE(norms[0] == norms[1]);
  return norms[0] * norms[0];
}

// The expected numbers are from a reference in numpy. It has the mean over the four ranks, one norm of dense and expert
// gradients, the factor by which it is clipped to 1.5, and two steps of AdamW.
TEST(Experts, TrainInTurnWithDenseLayersAsOneProgramWould) {
  constexpr float clip_factor = std::bit_cast<float>(0x3EBC0C20u);
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario dense = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
    dense.groups = layers_of("dense", 10);
    run_threads(dense, [&](uint32_t r, fsdp_context *context) {
      Expert expert(r);
      expert.setup.model.unshard_mode = mode;
      expert.setup.groups = layers_of("experts", 6);
      Rank both[] = {Rank(context, dense), Rank(context, expert.setup)};
      for (Rank &rank : both) load_layers(rank);
      for (uint32_t step = 0; step < adamw_count; ++step) {
        for (size_t l = 0; l < layer_count; ++l)
          for (Rank &rank : both) read_layer(rank, l, FSDP_FORWARD, 0);
        for (size_t l = layer_count; l-- > 0;)
          for (Rank *const rank : {&both[1], &both[0]}) {
            read_layer(*rank, l, FSDP_BACKWARD, 0);
            give_layer(*rank, l, rank == &both[0] ? dense_grad(r) : expert_grad(r));
          }
        for (Rank &rank : both) FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        const double squares[] = {squares_of(both[0]), squares_of(both[1])};
        REQUIRE(std::abs(squares[0] - 1.5703125) < 1e-12);
        REQUIRE(std::abs(squares[1] - (r % 2 ? 8.046875 : 7.0625)) < 1e-12);
        double all_squares[] = {r == 0 ? squares[0] : 0, r < 2 ? squares[1] : 0};  // each model's once
        FSDP(fsdp_all_reduce_values(context, nullptr, all_squares, 2, FSDP_VALUE_SUM));
        const double norm = std::sqrt(all_squares[0] + all_squares[1]);
        REQUIRE(std::abs(norm - 4.084077313176135) < 1e-12);
        REQUIRE(static_cast<float>(1.5 / norm) == clip_factor);
        fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
        adamw.weight_decay = 0.01;
        for (Rank &rank : both) {
          FSDP(fsdp_scale_grads(rank.model, static_cast<double>(clip_factor), nullptr));
          FSDP(fsdp_step_adamw(rank.model, 1e-2, &adamw, nullptr));
        }
      }
      for (size_t l = 0; l < layer_count; ++l) {
        read_layer(both[0], l, FSDP_EVAL, 0xADADBA91);
        read_layer(both[1], l, FSDP_EVAL, r % 2 ? 0xEF13B8CB : 0xC0D8F10E);
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

// Each wrong list is refused with a message that says what is wrong.
TEST(MeshOptions, EachWrongListIsRefusedWithItsReason) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    const auto refuse = [&](fsdp_mesh_options options, fsdp_status status, const std::vector<std::string> &words) {
      fsdp_mesh *mesh = nullptr;
      require_error(fsdp_create_mesh(context, &options, &mesh), status, words);
      REQUIRE(mesh == nullptr);
    };
    fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
    options.replicate_size = 3;
    refuse(options, FSDP_INVALID_ARGUMENT, {"replicate_size 3", "4 ranks"});
    options.replicate_size = 0;
    options.reduction_block_size = 3;
    refuse(options, FSDP_INVALID_ARGUMENT, {"reduction_block_size 3", "4 ranks"});
    options.reduction_block_size = 0;
    options.rank_count = 2;
    refuse(options, FSDP_INVALID_ARGUMENT, {"rank_count is 2", "NULL"});
    const uint32_t outside[] = {r, 9};
    options.ranks = outside;
    refuse(options, FSDP_INVALID_ARGUMENT, {"rank 9", "[0, 4)"});
    const uint32_t others[] = {(r + 1) % 4, (r + 2) % 4};
    options.ranks = others;
    refuse(options, FSDP_INVALID_ARGUMENT, {"this rank, " + std::to_string(r)});
    const uint32_t twice[] = {r, r};
    options.ranks = twice;
    refuse(options, FSDP_INVALID_ARGUMENT, {"rank " + std::to_string(r), "twice"});
    fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
    model_options.outer_strategy = FSDP_OUTER_OPTIM;
    fsdp_model *model = nullptr;
    require_error(fsdp_create_model(context, &model_options, &model), FSDP_INVALID_ARGUMENT,
                  {"FSDP_OUTER_OPTIM", "replicate_size"});
    FSDP(fsdp_close_context(context));
  });
}

// This release supports neither three axes nor uneven hosts.
TEST(MeshOptions, RefuseHostsThatCutAnAxisUnevenly) {
  for (const uint32_t ranks_per_host : {3u, 1u}) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
    setup.context.ranks_per_host = ranks_per_host;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
      options.replicate_size = ranks_per_host == 1 ? 2 : 1;
      fsdp_mesh *mesh = nullptr;
      require_error(
          fsdp_create_mesh(context, &options, &mesh), FSDP_UNSUPPORTED,
          {ranks_per_host == 1 ? "2 replicas of a shard axis that lies on 2 hosts" : "lies unevenly on its hosts"});
      FSDP(fsdp_close_context(context));
    });
  }
}

// Ranks are ranks of the job, in every argument and result: tested with a model of ranks 3 and 1, in this order.
TEST(JobRanks, AreMeantByAModelOfSomeOfThem) {
  const Scenario all = scenario_of(FSDP_STRATEGY_NO_SHARD, ranks, FSDP_UNSHARD_MAPPED);
  run_threads(all, [&](uint32_t r, fsdp_context *context) {
    if (r % 2 == 0) return FSDP(fsdp_close_context(context));
    const uint32_t members[] = {3, 1};
    Scenario setup = all;
    setup.mesh.ranks = members;
    setup.mesh.rank_count = 2;
    setup.mesh.shard_size = 2;
    Rank rank(context, setup);
    rank.load();
    const uint64_t count = rank.def(0).params[0].count();
    std::vector<float> data(count, static_cast<float>(r));
    FSDP(fsdp_begin_update(rank.model, nullptr));
    FSDP(fsdp_load_param(rank.groups[0], 0, r == 3 ? data.data() : nullptr, FSDP_FLOAT32, count, 3, 0));
    require_error(fsdp_load_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, count, 0, 0), FSDP_INVALID_ARGUMENT,
                  {"root", "0"});
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    std::vector<float> seen(count, -1);
    FSDP(fsdp_read_param(rank.groups[0], 0, r == 1 ? seen.data() : nullptr, FSDP_FLOAT32, count, 1, 0));
    REQUIRE(seen == std::vector<float>(count, r == 1 ? 3.0f : -1.0f));
    fsdp_chunk chunk = FSDP_CHUNK_INIT;
    for (const uint32_t of : {1u, 3u}) FSDP(fsdp_get_chunk(rank.groups[0], 0, of, &chunk));
    for (const uint32_t of : {0u, 2u, 4u})
      require_error(fsdp_get_chunk(rank.groups[0], 0, of, &chunk), FSDP_INVALID_ARGUMENT,
                    {"rank " + std::to_string(of)});
    const std::unique_ptr<fsdp_mesh, decltype(&fsdp_destroy_mesh)> mesh(make_mesh(context, {3, 1}), fsdp_destroy_mesh);
    // The next meeting reports how long ranks have waited.
    for (int turn = 0; turn < 2; ++turn) {
      reduce_all(rank, 1);
      double together = 1;
      FSDP(fsdp_all_reduce_values(context, mesh.get(), &together, 1, FSDP_VALUE_SUM));
      if (r == 3) pause_ms(1500);
      FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
    }
    reduce_all(rank, 1);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
    REQUIRE(rank.stats().last_rank == 3);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_begin_update(rank.model, nullptr));
    for (const fsdp_shard &shard : rank.shards())
      if (r == 1) static_cast<float *>(shard.main_weight)[0] += 1;
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    require_error(fsdp_check_replicas(rank.model, 0, nullptr), FSDP_MISMATCH, {"weights of rank 1", "those of rank 3"});
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_last_error(context, &error));
    REQUIRE(error.rank == 1);
    FSDP(fsdp_close_context(context));
  });
}

// Each host has two ranks, so blocks of any other size are refused.
TEST(ReductionBlocks, OverHostsAreThoseOfTheHosts) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
  setup.context.ranks_per_host = 2;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
    fsdp_mesh *mesh = nullptr;
    for (const uint32_t block : {1u, 4u}) {
      options.reduction_block_size = block;
      require_error(fsdp_create_mesh(context, &options, &mesh), FSDP_UNSUPPORTED,
                    {"reduction_block_size " + std::to_string(block), "in blocks of 2"});
    }
    options.reduction_block_size = 2;
    FSDP(fsdp_create_mesh(context, &options, &mesh));
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
