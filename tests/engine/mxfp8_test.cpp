// SPDX-License-Identifier: Apache-2.0
// MXFP8 parameters: each phase reads one of two forms. Tested are the gathered bytes, and the holds that exclude each
// other.
#include <cmath>
#include <tuple>

#include "device.h"
#include "element.h"
#include "misuse.h"
#include "train_as_planned.h"

using namespace harness;
using namespace misuse;

namespace {

constexpr fsdp_unshard_mode modes[] = {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED};

ParamDef mxfp8(ParamDef param) {
  param.quantization = FSDP_QUANTIZE_MXFP8;
  return param;
}

Scenario one_matrix(uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  setup.groups = {{"g", {mxfp8({"w", {64, 96}})}}};
  setup.model.flags = FSDP_MODEL_NO_PREFETCH | FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

// Beside FP8 blocks and weights as they are.
Scenario mixed(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  ParamDef blocks{"blocks", {150, 40}};
  blocks.quantization = FSDP_QUANTIZE_FP8_BLOCK;
  setup.groups = {{"first", {mxfp8({"square", {96, 64}, FSDP_BFLOAT16}), {"bias", {24}, FSDP_BFLOAT16}, blocks}},
                  {"second", {mxfp8({"stack", {3, 32, 32}}), mxfp8({"tall", {160, 32}}), {"usual", {24, 24}}}},
                  {"third", {mxfp8({"whole", {64, 32}, FSDP_FLOAT32, FSDP_PARAM_NO_DECAY, FSDP_GRANULE_TENSOR})}}};
  return setup;
}

uint32_t crc_of(Rank &rank, fsdp_phase phase, fsdp_plane plane) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_plane(rank.groups[0], 0, phase, plane, &view));
  return crc32(view.data, view.element_count * view.element_size);
}

struct Sums {
  fsdp_scale_rule rule;
  uint32_t row, row_scales, column, column_scales;
};

// Checksums, computed without this library, of a matrix that is given by a formula.
TEST(Mxfp8, KnownMatrixOnAnyRanks) {
  std::vector<float> x(64 * 96);
  for (int i = 0; i < 64 * 96; ++i) {
    const int r = i / 96, c = i % 96;
    x[static_cast<size_t>(i)] =
        std::ldexp(static_cast<float>((131 * r + 71 * c) % 257 - 128), (r / 32 + c / 32) % 7 - 3);
  }
  ASSERT_EQ(crc32(x.data(), x.size() * 4), 0xbca3e316u);
  for (const Sums &sums : {Sums{FSDP_SCALE_ROUND_UP, 0xb2b05f75, 0x5cd4c831, 0x235e7409, 0xf999b80d},
                           Sums{FSDP_SCALE_FLOOR, 0xb5d3e81a, 0x530bbd52, 0x31b58d67, 0x5fccde2a}})
    for (uint32_t ranks = 1; ranks <= 4; ++ranks)
      for (const auto mode : modes) {
        Scenario setup = one_matrix(ranks, mode);
        setup.model.scale_rule = sums.rule;
        run_threads(setup, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          FSDP(fsdp_load_param(rank.groups[0], 0, x.data(), FSDP_FLOAT32, x.size(), FSDP_EVERY_RANK, 0));
          FSDP(fsdp_publish_weights(rank.model, nullptr));
          for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_RECOMPUTE, FSDP_EVAL}) {
            FSDP(fsdp_unshard(rank.groups[0], phase, 0, nullptr));
            EXPECT_EQ(crc_of(rank, phase, FSDP_PLANE_ROW), sums.row) << ranks << " ranks, mode " << mode;
            EXPECT_EQ(crc_of(rank, phase, FSDP_PLANE_ROW_SCALE), sums.row_scales);
            FSDP(fsdp_reshard(rank.groups[0], phase, 0, nullptr));
          }
          FSDP(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr));
          EXPECT_EQ(crc_of(rank, FSDP_BACKWARD, FSDP_PLANE_COLUMN), sums.column);
          EXPECT_EQ(crc_of(rank, FSDP_BACKWARD, FSDP_PLANE_COLUMN_SCALE), sums.column_scales);
          FSDP(fsdp_reshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr));
        });
      }
}

class Training : public testing::TestWithParam<std::tuple<uint32_t, fsdp_strategy>> {};

TEST_P(Training, HasTheReferencesBits) {
  const auto [ranks, strategy] = GetParam();
  if ((is_sanitized() || on_gpu()) && ranks != 3) GTEST_SKIP() << "sanitizers and GPUs have one number of ranks";
  for (const auto mode : modes)
    for (const fsdp_plane_policy policy :
         {FSDP_PLANES_BY_PHASE, FSDP_PLANES_BY_PHASE_AND_RECOMPUTE, FSDP_PLANES_BOTH}) {
      Scenario setup = mixed(strategy, ranks, mode);
      setup.model.plane_policy = policy;
      setup.microbatches = 2;
      setup.eval = true;
      setup.recompute = policy != FSDP_PLANES_BY_PHASE;  // inside of BACKWARD
      EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode << ", policy " << policy;
    }
}

INSTANTIATE_TEST_SUITE_P(OnOneToFourRanks, Training,
                         testing::Combine(testing::Values(1u, 2u, 3u, 4u), testing::ValuesIn(strategies)));

TEST(Mxfp8, IsTheSameInProcessesOverTwoAxesAndInDebugMode) {
  for (const auto mode : modes) {
    EXPECT_EQ(train_as_planned(mixed(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode), true), "") << "mode " << mode;
    for (const int kind : {0, 1, 2}) {
      Scenario setup = mixed(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, mode);
      if (kind == 2)
        setup.context.ranks_per_host = 2;
      else
        setup.mesh.replicate_size = setup.mesh.shard_size = 2;
      if (kind == 1) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
      EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode << ", kind " << kind;
    }
    Scenario debug = mixed(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
    debug.context.flags = FSDP_CONTEXT_DEBUG;
    EXPECT_EQ(train_as_planned(debug), "") << "mode " << mode;
  }
}

TEST(Mxfp8, MatchesTheReferenceWithOptionsAndSchedules) {
  for (const fsdp_scale_rule rule : {FSDP_SCALE_ROUND_UP, FSDP_SCALE_FLOOR})
    for (const fsdp_dtype from : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
      Scenario setup = mixed(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
      setup.model.scale_rule = rule;
      setup.model.quantize_from = from;
      setup.schedule = FSDP_SCHEDULE_INTERLEAVED;
      EXPECT_EQ(train_as_planned(setup), "") << "rule " << rule << ", from " << from;
    }
  Scenario resident = mixed(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  resident.groups[1].options.flags = FSDP_GROUP_RESIDENT;
  resident.groups[0].options.flags = FSDP_GROUP_ROOT;
  EXPECT_EQ(train_as_planned(resident), "");
}

// As in quantized_test.cpp, for two forms whose buffers other groups use in between.
TEST(Mxfp8, NoReaderSeesAnotherVersion) {
  for (const auto mode : modes) {
    Scenario setup = mixed(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode);
    setup.context.debug_delay_us = 300;
    setup.context.debug_delay_seed = 7;
    setup.steps = is_sanitized() ? 2 : 4;
    EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode;
  }
}

// A NaN makes its block NaN in each form. An Inf becomes the largest code with the largest scale. Other blocks do not
// change.
TEST(Mxfp8, NanAndInfStayInTheirBlocks) {
  std::vector<float> x(64 * 96, 1.0F);
  x[5 * 96 + 40] = NAN, x[40 * 96 + 70] = -INFINITY;
  run_threads(one_matrix(2), [&](uint32_t, fsdp_context *context) {
    Rank rank(context, one_matrix(2));
    FSDP(fsdp_load_param(rank.groups[0], 0, x.data(), FSDP_FLOAT32, x.size(), FSDP_EVERY_RANK, 0));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    const auto look = [&](fsdp_phase phase, fsdp_plane codes_plane, fsdp_plane scales_plane, auto block_of) {
      fsdp_tensor codes = FSDP_TENSOR_INIT, scales = FSDP_TENSOR_INIT;
      FSDP(fsdp_unshard(rank.groups[0], phase, 0, nullptr));
      FSDP(fsdp_get_plane(rank.groups[0], 0, phase, codes_plane, &codes));
      FSDP(fsdp_get_plane(rank.groups[0], 0, phase, scales_plane, &scales));
      const size_t nan = block_of(5, 40), inf = block_of(40, 70);
      size_t wrong = 0;
      for (size_t r = 0; r < 64; ++r)
        for (size_t c = 0; c < 96; ++c) {
          const size_t block = block_of(r, c);
          const bool is_inf = r == 40 && c == 70;
          const uint8_t code = static_cast<const uint8_t *>(codes.data)[r * 96 + c];
          const uint8_t scale = static_cast<const uint8_t *>(scales.data)[block];
          if (block == nan)
            wrong += scale != 0xff || code != 0x7f;
          else if (block == inf)
            wrong += scale != 0xfe || code != (is_inf ? 0xfe : 0x00);
          else
            wrong += scale != 119 || code != 0x78;
        }
      EXPECT_EQ(wrong, 0u) << "phase " << phase;
      FSDP(fsdp_reshard(rank.groups[0], phase, 0, nullptr));
    };
    look(FSDP_FORWARD, FSDP_PLANE_ROW, FSDP_PLANE_ROW_SCALE, [](size_t r, size_t c) { return r * 3 + c / 32; });
    look(FSDP_BACKWARD, FSDP_PLANE_COLUMN, FSDP_PLANE_COLUMN_SCALE, [](size_t r, size_t c) { return r / 32 * 96 + c; });
  });
}

// 64 x 96: 6,144 codes and 192 scales for a form.
TEST(Mxfp8, GatheredBytes) {
  constexpr uint64_t form = 6336;
  Scenario setup = one_matrix(2);
  setup.steps = 1;
  const auto gathered = [&] { return train_threads(setup)[1].stats.gathered_bytes; };
  EXPECT_EQ(gathered(), 2 * form);
  setup.model.plane_policy = FSDP_PLANES_BOTH;
  EXPECT_EQ(gathered(), 4 * form);
  setup.model.plane_policy = FSDP_PLANES_BY_PHASE_AND_RECOMPUTE;
  EXPECT_EQ(gathered(), 2 * form);
  setup.recompute = true;
  EXPECT_EQ(gathered(), 3 * form);
  setup.recompute = false;
  setup.groups[0].params[0].quantization = 0;
  setup.set_dtype(FSDP_BFLOAT16);
  EXPECT_EQ(gathered(), 24576u);
}

// If a strategy keeps weights whole, it has both forms, whatever the policy. Each of the two publishes brings the other
// rank's half.
TEST(Mxfp8, WholeWeightsAreGatheredInBothForms) {
  constexpr uint64_t form = 6336;
  Scenario setup = one_matrix(2);
  setup.steps = 1;
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS})
    for (const fsdp_plane_policy policy :
         {FSDP_PLANES_BY_PHASE, FSDP_PLANES_BY_PHASE_AND_RECOMPUTE, FSDP_PLANES_BOTH}) {
      setup.model.strategy = strategy;
      setup.model.plane_policy = policy;
      const Stats stats = train_threads(setup)[1].stats;
      const uint64_t gathered = strategy == FSDP_STRATEGY_NO_SHARD ? 0 : 2 * form / 2;
      EXPECT_EQ(stats.gathered_bytes, 2 * gathered) << "strategy " << strategy << ", policy " << policy;
      EXPECT_EQ(stats.gathered_row_bytes, gathered) << "strategy " << strategy << ", policy " << policy;
      EXPECT_EQ(stats.gathered_column_bytes, gathered) << "strategy " << strategy << ", policy " << policy;
    }
}

// The last group's weights are not kept from its forward visit to its backward one, which reads other planes.
TEST(Mxfp8, GathersOncePerDirectionWithAndWithoutPrefetch) {
  for (const auto mode : modes)
    for (const uint32_t flags : {0u, FSDP_MODEL_NO_PREFETCH + 0u}) {
      Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
      setup.groups = equal_groups(4, 64, 96);
      for (GroupDef &group : setup.groups) group.params[0].quantization = FSDP_QUANTIZE_MXFP8;
      setup.model.flags = flags;
      setup.steps = 3, setup.microbatches = 2;
      for (const Outcome &outcome : train_threads(setup)) {
        EXPECT_EQ(outcome.stats.gathers, 3u * 2 * 2 * 4) << "mode " << mode << ", flags " << flags;
        EXPECT_EQ(outcome.stats.gathered_bytes, mode == FSDP_UNSHARD_COPIED || on_gpu() ? 3 * 2 * 2 * 4 * 6336u : 0u);
        EXPECT_EQ(outcome.stats.dropped_prefetches, 0u);
      }
    }
}

// The schedule has a recompute before each backward visit, so its planes are gathered ahead, too.
TEST(Mxfp8, RecomputeVisitsAreGatheredAhead) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.prefetch_small_groups();
  setup.groups = equal_groups(3, 64, 96);
  for (GroupDef &group : setup.groups) group.params[0].quantization = FSDP_QUANTIZE_MXFP8;
  setup.schedule = FSDP_SCHEDULE_VISITS;
  setup.steps = 2;
  for (uint32_t g = 0; g < 3; ++g) setup.visits.push_back({g, FSDP_FORWARD, 0});
  for (uint32_t g = 3; g-- > 0;)
    setup.visits.push_back({g, FSDP_RECOMPUTE, 0}), setup.visits.push_back({g, FSDP_BACKWARD, 0});
  const auto expected = reference(setup).weights;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (uint32_t step = 0; step < setup.steps; ++step) {
      forward(rank, nullptr);
      for (size_t g = 3; g-- > 0;) {
        FSDP(fsdp_unshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
        rank.view(g, 0, FSDP_RECOMPUTE);
        FSDP(fsdp_reshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
        backward_group(rank, g, step, 0, nullptr);
      }
      FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
      update(rank);
    }
    const Stats stats = rank.stats();
    // The last group's ROW planes stay from its forward visit to its recompute, which comes next.
    EXPECT_EQ(stats.gathers, 2u * (3 * 3 - 1));
    EXPECT_EQ(stats.prefetches, 2u * (3 * 3 - 1) - 2);
    EXPECT_EQ(stats.dropped_prefetches, 0u);
    EXPECT_TRUE(same_bits(rank.read_all(), expected));
  });
}

TEST(Mxfp8, RecomputeComesFirstUnlessItWasPlannedFor) {
  for (const auto mode : modes)
    for (const fsdp_plane_policy policy : {FSDP_PLANES_BY_PHASE, FSDP_PLANES_BY_PHASE_AND_RECOMPUTE}) {
      Scenario setup = one_matrix(1, mode);
      setup.model.plane_policy = policy;
      Solo solo(State::published, setup);
      fsdp_group *const group = solo.group(0);
      const auto hold = [&](fsdp_phase phase) { return fsdp_unshard(group, phase, 0, nullptr); };
      const auto give_back = [&](fsdp_phase phase) { FSDP(fsdp_reshard(group, phase, 0, nullptr)); };
      for (const auto &[first, second] :
           {std::pair(FSDP_BACKWARD, FSDP_RECOMPUTE), std::pair(FSDP_RECOMPUTE, FSDP_BACKWARD)}) {
        FSDP(hold(first));
        if (policy == FSDP_PLANES_BY_PHASE) {
          EXPECT_FAILS(
              FSDP_INVALID_STATE, hold(second), "group 'g'",
              first == FSDP_BACKWARD ? "RECOMPUTE needs its ROW planes while BACKWARD holds the COLUMN ones"
                                     : "BACKWARD needs its COLUMN planes while RECOMPUTE holds the ROW ones",
              "FSDP_PLANES_BY_PHASE_AND_RECOMPUTE",
              first == FSDP_BACKWARD ? "recompute before unsharding for BACKWARD" : "return the RECOMPUTE hold first");
        } else {
          FSDP(hold(second));
          EXPECT_EQ(solo.rank->view(0, 0, FSDP_BACKWARD).size(), 64u * 96);
          EXPECT_EQ(solo.rank->view(0, 0, FSDP_RECOMPUTE).size(), 64u * 96);
          give_back(second);
        }
        give_back(first);
      }
      const uint64_t before = solo.rank->stats().gathers;
      for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_RECOMPUTE, FSDP_BACKWARD}) FSDP(hold(phase)), give_back(phase);
      EXPECT_EQ(solo.rank->stats().gathers, before + 3) << "staged";
      solo.clean_step();
    }
}

TEST(Mxfp8, PhaseShowsOnlyItsPlanes) {
  for (const auto mode : modes)
    for (const bool both : {false, true}) {
      Scenario setup = one_matrix(1, mode);
      if (both) setup.model.plane_policy = FSDP_PLANES_BOTH;
      Solo solo(State::published, setup);
      fsdp_tensor view = FSDP_TENSOR_INIT;
      const auto get = [&](fsdp_phase phase, fsdp_plane plane) {
        return fsdp_get_plane(solo.group(0), 0, phase, plane, &view);
      };
      for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD}) {
        FSDP(fsdp_unshard(solo.group(0), phase, 0, nullptr));
        const bool backward = phase == FSDP_BACKWARD;
        for (const fsdp_plane plane :
             {FSDP_PLANE_ROW, FSDP_PLANE_ROW_SCALE, FSDP_PLANE_COLUMN, FSDP_PLANE_COLUMN_SCALE}) {
          if (both || backward == (plane >= FSDP_PLANE_COLUMN))
            EXPECT_WORKS(get(phase, plane));
          else
            EXPECT_FAILS(FSDP_INVALID_STATE, get(phase, plane), backward ? "phase BACKWARD" : "phase FORWARD", "'g'",
                         backward ? "COLUMN planes" : "ROW planes", "'w'", "FSDP_PLANES_BOTH");
        }
        if (!both) {
          EXPECT_FAILS(FSDP_INVALID_STATE,
                       get(backward ? FSDP_FORWARD : FSDP_BACKWARD, backward ? FSDP_PLANE_ROW : FSDP_PLANE_COLUMN),
                       "call fsdp_unshard first");
        }
        FSDP(fsdp_reshard(solo.group(0), phase, 0, nullptr));
      }
    }
}

class Mxfp8Misuse : public Declared {};

TEST_F(Mxfp8Misuse, SizesThatCannotBeQuantizedAreNamed) {
  static constexpr uint64_t columns[] = {64, 33}, rows[] = {48, 64}, stack[] = {4, 16, 32};
  fsdp_param params[3] = {param("columns"), param("rows"), param("stack")};
  params[0].shape = columns, params[1].shape = rows, params[2].shape = stack, params[2].dimension_count = 3;
  for (fsdp_param &p : params) p.quantization = FSDP_QUANTIZE_MXFP8;
  FSDP(add_group("g", {params[0], params[1], params[2]}));
  char text[1024];
  uint64_t size = sizeof text;
  FSDP(fsdp_check_model(model, text, &size));
  EXPECT_EQ(
      std::string(text),
      "parameter 'columns' of group 'g': FSDP_QUANTIZE_MXFP8 needs matrices of a multiple of 32 columns, but shape[1] "
      "is 33\n"
      "parameter 'rows' of group 'g': FSDP_QUANTIZE_MXFP8 needs matrices of a multiple of 32 rows, but shape[0] is 48; "
      "pad the matrices\n"
      "parameter 'stack' of group 'g': FSDP_QUANTIZE_MXFP8 needs matrices of a multiple of 32 rows, but shape[1] is "
      "16; pad the matrices\n");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "'columns'", "2 more");
}

TEST(Mxfp8, RecomputeInABackwardVisitIsNotForInterleavedSchedules) {
  Scenario setup = one_matrix(1);
  setup.model.plane_policy = FSDP_PLANES_BY_PHASE_AND_RECOMPUTE;
  setup.schedule = FSDP_SCHEDULE_INTERLEAVED;
  Solo solo(State::declared, setup);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(solo.model), "group 'g'", "FSDP_SCHEDULE_INTERLEAVED",
               "FSDP_PLANES_BOTH");
}

}  // namespace
