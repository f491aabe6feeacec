// SPDX-License-Identifier: Apache-2.0
// Groups with planes by phase: what each phase reads, at which address, and when it is gathered.
#include <map>
#include <set>

#include "device.h"
#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

Scenario layers(uint32_t ranks, uint32_t count, fsdp_quantization quantization, fsdp_unshard_mode mode) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  setup.groups = equal_groups(count, 64, 96);
  for (GroupDef &group : setup.groups) group.params[0].quantization = quantization;
  return setup;
}

fsdp_model_info info_of(uint32_t dimensions, const uint64_t *shape, uint64_t granule_rows,
                        fsdp_quantization quantization) {
  fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  setup.groups = {{"g", {{"w", std::vector<uint64_t>(shape, shape + dimensions)}}}};
  ParamDef &param = setup.groups[0].params[0];
  param.quantization = quantization;
  param.granule = FSDP_GRANULE_BLOCK;
  param.granule_rows = granule_rows;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    if (r == 0) FSDP(fsdp_get_model_info(rank.model, &info));
  });
  return info;
}

// As many rows as the tensor has, and no more: what is beyond it would be memory on every rank. Of three dimensions a
// row is a matrix.
TEST(PlanePhases, AGranuleIsNotLongerThanItsTensor) {
  constexpr uint64_t matrix[] = {256, 64}, stack[] = {8, 32, 64};
  for (const fsdp_quantization quantization : {fsdp_quantization{FSDP_QUANTIZE_MXFP8}, fsdp_quantization{0}})
    EXPECT_EQ(info_of(2, matrix, 1024, quantization).padding_count, 256u * 64) << "all of it is rank 0's";
  EXPECT_EQ(info_of(2, matrix, 1024, FSDP_QUANTIZE_FP8_BLOCK).padding_count, 256u * 64);
  EXPECT_EQ(info_of(3, stack, 128, FSDP_QUANTIZE_MXFP8).padding_count, 8u * 32 * 64);
  EXPECT_EQ(info_of(3, stack, 4, FSDP_QUANTIZE_MXFP8).padding_count, 0u);
}

// The rule holds even if nothing is gathered, so that a program for one rank also runs on many.
TEST(PlanePhases, OneRankRefusesWhatManyRanksRefuse) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Solo solo(State::published, layers(1, 1, FSDP_QUANTIZE_MXFP8, mode));
    fsdp_group *const group = solo.group(0);
    fsdp_tensor view = FSDP_TENSOR_INIT;
    FSDP(fsdp_unshard(group, FSDP_BACKWARD, 0, nullptr));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(group, FSDP_RECOMPUTE, 0, nullptr),
                 "RECOMPUTE needs its ROW planes while BACKWARD holds the COLUMN ones",
                 "or recompute before unsharding for BACKWARD");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_plane(group, 0, FSDP_BACKWARD, FSDP_PLANE_ROW, &view),
                 "phase BACKWARD of group 'layer.0' gathers COLUMN planes");
    EXPECT_WORKS(fsdp_get_plane(group, 0, FSDP_BACKWARD, FSDP_PLANE_COLUMN, &view));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_FORWARD, 0, nullptr),
                 "no FORWARD hold to return; its holds are: BACKWARD x 1");
    FSDP(fsdp_reshard(group, FSDP_BACKWARD, 0, nullptr));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_BACKWARD, 0, nullptr), "its holds are: none");
    FSDP(fsdp_unshard(group, FSDP_RECOMPUTE, 0, nullptr));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(group, FSDP_BACKWARD, 0, nullptr),
                 "BACKWARD needs its COLUMN planes while RECOMPUTE holds the ROW ones",
                 "or return the RECOMPUTE hold first");
    FSDP(fsdp_reshard(group, FSDP_RECOMPUTE, 0, nullptr));
    solo.clean_step();
  }
}

// Each parameter, quantized or not, has one address for BACKWARD and one for the other phases, and neither changes.
TEST(PlanePhases, AddressesAreFixedByPhase) {
  Scenario setup = layers(2, 3, FSDP_QUANTIZE_MXFP8, FSDP_UNSHARD_COPIED);
  for (GroupDef &group : setup.groups) group.params.push_back({group.name + ".bias", {96}});
  setup.steps = 2;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    std::map<std::pair<size_t, bool>, std::set<const void *>> seen;
    const auto look = [&](size_t g, fsdp_phase phase) {
      FSDP(fsdp_unshard(rank.groups[g], phase, 0, nullptr));
      fsdp_tensor view = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_param(rank.groups[g], 1, phase, &view));
      seen[{g, phase == FSDP_BACKWARD}].insert(view.data);
      FSDP(fsdp_reshard(rank.groups[g], phase, 0, nullptr));
    };
    for (uint32_t step = 0; step < setup.steps; ++step) {
      for (const fsdp_phase phase : {FSDP_EVAL, FSDP_FORWARD})
        for (size_t g = 0; g < 3; ++g) look(g, phase);
      for (size_t g = 3; g-- > 0;)
        for (const fsdp_phase phase : {FSDP_RECOMPUTE, FSDP_BACKWARD}) look(g, phase);
      clean_step(rank, step);
    }
    for (size_t g = 0; g < 3; ++g) {
      const auto &forth = seen[{g, false}], &back = seen[{g, true}];
      EXPECT_EQ(forth.size(), 1u);
      EXPECT_EQ(back.size(), 1u);
      EXPECT_NE(*forth.begin(), *back.begin());
    }
  });
}

// A whole segment is recomputed before its backward visits. Each group is returned when the second group after it
// comes, so that a buffer is free for the group that is gathered ahead.
TEST(PlanePhases, RecomputedSegmentsAreGatheredAhead) {
  for (const fsdp_quantization quantization : {fsdp_quantization{0}, fsdp_quantization{FSDP_QUANTIZE_MXFP8}}) {
    constexpr uint32_t count = 5;
    Scenario setup = layers(2, count, quantization, FSDP_UNSHARD_COPIED);
    setup.prefetch_small_groups();
    setup.schedule = FSDP_SCHEDULE_VISITS;
    setup.steps = 2;
    for (uint32_t g = 0; g < count; ++g) setup.visits.push_back({g, FSDP_FORWARD, 0});
    for (uint32_t g = 0; g < count; ++g) setup.visits.push_back({g, FSDP_RECOMPUTE, 0});
    for (uint32_t g = count; g-- > 0;) setup.visits.push_back({g, FSDP_BACKWARD, 0});
    const auto expected = reference(setup).weights;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      for (uint32_t step = 0; step < setup.steps; ++step) {
        forward(rank, nullptr);
        for (size_t g = 0; g < count; ++g) {
          FSDP(fsdp_unshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
          rank.view(g, 0, FSDP_RECOMPUTE);
          FSDP(fsdp_reshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
        }
        for (size_t g = count; g-- > 0;) backward_group(rank, g, step, 0, nullptr);
        FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
        update(rank);
      }
      const Stats stats = rank.stats();
      // Unquantized weights of the last group stay from its recompute to its backward visit; planes by phase do not.
      const uint32_t gathers = 3 * count - (quantization ? 0 : 1);
      EXPECT_EQ(stats.gathers, 2 * gathers) << "quantization " << quantization;
      EXPECT_EQ(stats.prefetches, 2 * (gathers - 1)) << "all but the first of a step";
      EXPECT_EQ(stats.dropped_prefetches, 0u);
      EXPECT_TRUE(same_bits(rank.read_all(), expected));
    });
  }
}

// A resident group has its buffer until its backward visit ends, whatever visits there are between.
TEST(PlanePhases, ResidentGroupsStayThroughTheirRecompute) {
  Scenario setup = layers(2, 3, 0, FSDP_UNSHARD_COPIED);
  setup.groups[0].options.flags = FSDP_GROUP_RESIDENT;
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.schedule = FSDP_SCHEDULE_VISITS;
  for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_RECOMPUTE})
    for (uint32_t g = 0; g < 3; ++g) setup.visits.push_back({g, phase, 0});
  for (uint32_t g = 3; g-- > 0;) setup.visits.push_back({g, FSDP_BACKWARD, 0});
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    forward(rank, nullptr);
    for (size_t g = 0; g < 3; ++g) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
      FSDP(fsdp_reshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
    }
    for (size_t g = 3; g-- > 0;) backward_group(rank, g, 0, 0, nullptr);
    // The resident group is gathered once. Each visit of another group gathers, except the last group's backward visit,
    // which follows its forward visit.
    EXPECT_EQ(rank.stats().gathers, 1u + 3 + 2);
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

// A recompute right before its backward visit leaves its weights to that visit, also if nothing is gathered ahead.
TEST(PlanePhases, RecomputeLeavesItsWeightsToTheNextVisit) {
  Scenario setup = layers(2, 3, 0, FSDP_UNSHARD_COPIED);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.schedule = FSDP_SCHEDULE_VISITS;
  for (uint32_t g = 0; g < 3; ++g) setup.visits.push_back({g, FSDP_FORWARD, 0});
  for (uint32_t g = 3; g-- > 0;)
    setup.visits.push_back({g, FSDP_RECOMPUTE, 0}), setup.visits.push_back({g, FSDP_BACKWARD, 0});
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    forward(rank, nullptr);
    for (size_t g = 3; g-- > 0;) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
      FSDP(fsdp_reshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
      backward_group(rank, g, 0, 0, nullptr);
    }
    EXPECT_EQ(rank.stats().gathers, 2u * 3);
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

// Forward and backward passes of two micro-batches have a buffer each; by phase a recompute would need a third.
TEST(PlanePhases, InterleavedSchedulesRecomputeWithBothPlanes) {
  for (const fsdp_plane_policy policy : {FSDP_PLANES_BY_PHASE, FSDP_PLANES_BOTH}) {
    Scenario setup = layers(1, 4, FSDP_QUANTIZE_MXFP8, FSDP_UNSHARD_COPIED);
    setup.model.flags = FSDP_MODEL_NO_PREFETCH | FSDP_MODEL_FORCE_COMMUNICATION;
    setup.model.plane_policy = policy;
    setup.schedule = FSDP_SCHEDULE_INTERLEAVED;
    Solo solo(State::published, setup);
    FSDP(fsdp_unshard(solo.group(1), FSDP_FORWARD, 0, nullptr));
    if (policy == FSDP_PLANES_BOTH) {
      EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_RECOMPUTE, 0, nullptr));
      FSDP(fsdp_reshard(solo.group(0), FSDP_RECOMPUTE, 0, nullptr));
    } else {
      EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(solo.group(0), FSDP_RECOMPUTE, 0, nullptr), "group 'layer.0'",
                   "the buffer that group 'layer.1' holds", "create the model with FSDP_PLANES_BOTH");
    }
    FSDP(fsdp_reshard(solo.group(1), FSDP_FORWARD, 0, nullptr));
    solo.clean_step();
  }
}

}  // namespace
