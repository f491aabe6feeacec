// SPDX-License-Identifier: Apache-2.0
// Pieces of a group are gathered and held separately, and planned by visits.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "checkpoint_folder.h"
#include "pieces.h"

using namespace harness;

namespace {

// The odd groups with more parameters in pieces, some of which are frozen or of another dtype.
std::vector<GroupDef> odd_pieces() {
  std::vector<GroupDef> groups = odd_groups();
  for (GroupDef &group : groups)
    for (uint32_t p = 0; p < group.params.size(); ++p) group.params[p].piece = (p + 1) / 2;
  groups[1].params[1].dtype = FSDP_BFLOAT16;
  groups[2].params[0].flags = FSDP_PARAM_FROZEN;
  groups[2].params[2].dtype = FSDP_BFLOAT16;
  return groups;
}

struct Counted {
  uint64_t gathers, all_gathers, bytes;
  bool operator==(const Counted &) const = default;
};

TEST(Pieces, EachIsGatheredOnceAndTheGroupGathersTheRest) {
  each_rank(four_scenario(), [](Rank &rank) {
    fsdp_group *const group = rank.groups[0];
    Stats before = rank.stats();
    const auto counted = [&] {
      const Stats now = rank.stats();
      const Counted counts{now.gathers - before.gathers, now.all_gathers - before.all_gathers,
                           now.gathered_bytes - before.gathered_bytes};
      before = now;
      return counts;
    };
    for (const uint32_t piece : {0u, 1u, 2u}) {
      FSDP(fsdp_unshard_piece(group, piece, FSDP_FORWARD, 0, nullptr));
      REQUIRE((counted() == Counted{1, 1, (piece == 1 ? 2 : 1) * matrix_bytes}));
    }
    FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
    REQUIRE((counted() == Counted{0, 0, 0}));
    for (const uint32_t piece : {0u, 1u, 2u}) FSDP(fsdp_reshard_piece(group, piece, FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_unshard_piece(group, 2, FSDP_FORWARD, 0, nullptr));
    REQUIRE((counted() == Counted{0, 0, 0}));  // fsdp_unshard still holds it
    FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
    // Piece 2 is held and stays. The others are gathered in one launch.
    FSDP(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));
    REQUIRE((counted() == Counted{2, 1, 3 * matrix_bytes}));
    FSDP(fsdp_reshard_piece(group, 2, FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_reshard(group, FSDP_EVAL, 0, nullptr));
    REQUIRE(rank.stats().gathered_groups == 0 && rank.stats().peak_gathered_groups == 1);
  });
}

TEST(Pieces, OnlyTheHeldOnesAreReadable) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    each_rank(four_scenario(mode), [](Rank &rank) {
      const auto weights = rank.read_all();
      fsdp_tensor tensor = FSDP_TENSOR_INIT;
      fsdp_tensor all[4] = {FSDP_TENSOR_INIT, FSDP_TENSOR_INIT, FSDP_TENSOR_INIT, FSDP_TENSOR_INIT};
      // One micro-batch holds piece 1. Another one, in its backward pass, holds piece 2.
      FSDP(fsdp_unshard_piece(rank.groups[0], 1, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_unshard_piece(rank.groups[0], 2, FSDP_BACKWARD, 0, nullptr));
      for (const size_t p : {1, 2}) REQUIRE(rank.view(0, p, FSDP_FORWARD) == weights[p]);
      REQUIRE(rank.view(0, 3, FSDP_BACKWARD) == weights[3]);
      require_error(fsdp_get_param(rank.groups[0], 0, FSDP_FORWARD, &tensor), FSDP_INVALID_STATE,
                    {"'layer.0' is not readable", "fsdp_unshard_piece with piece 0"});
      require_error(fsdp_get_params(rank.groups[0], FSDP_FORWARD, all, 4, sizeof(fsdp_tensor)), FSDP_INVALID_STATE,
                    {"piece 0"});
      FSDP(fsdp_reshard_piece(rank.groups[0], 1, FSDP_FORWARD, 0, nullptr));
      require_error(fsdp_get_param(rank.groups[0], 1, FSDP_FORWARD, &tensor), FSDP_INVALID_STATE, {"piece 1"});
      REQUIRE(rank.view(0, 3, FSDP_BACKWARD) == weights[3]);
      FSDP(fsdp_reshard_piece(rank.groups[0], 2, FSDP_BACKWARD, 0, nullptr));
    });
}

TEST(Pieces, AreToldByTheGroupsInfo) {
  Scenario scenario = four_scenario();
  scenario.groups[0].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
  scenario.groups[0].options.main_storage = FSDP_MAIN_SPLIT16;
  scenario.groups.push_back(equal_groups(2, 8, 8)[1]);
  each_rank(scenario, [](Rank &rank) {
    fsdp_group_info info = FSDP_GROUP_INFO_INIT;
    FSDP(fsdp_get_group_info(rank.groups[0], &info));
    REQUIRE(info.piece_count == 3 && info.backward_weights == FSDP_BACKWARD_WEIGHTS_NONE);
    REQUIRE(info.main_storage == FSDP_MAIN_SPLIT16);
    FSDP(fsdp_get_group_info(rank.groups[1], &info));
    REQUIRE(info.piece_count == 1 && info.backward_weights == FSDP_BACKWARD_WEIGHTS_GATHERED);
    REQUIRE(info.main_storage == FSDP_MAIN_FLOAT32);
    fsdp_param param = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(rank.groups[0], 3, &param));
    REQUIRE(param.piece == 2);
  });
}

TEST(Pieces, AHoldIsReturnedByTheCallThatBelongsToIt) {
  each_rank(four_scenario(), [](Rank &rank) {
    fsdp_group *const group = rank.groups[0];
    require_error(fsdp_reshard_piece(group, 1, FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
                  {"piece 1 of group 'layer.0' has no FORWARD hold of fsdp_unshard_piece to return", "none"});
    FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
    require_error(
        fsdp_reshard_piece(group, 1, FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
        {"piece 1 of group 'layer.0'", "only holds of fsdp_unshard, which fsdp_reshard returns", "FORWARD x 1"});
    FSDP(fsdp_unshard_piece(group, 1, FSDP_BACKWARD, 0, nullptr));
    require_error(fsdp_reshard(group, FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE,
                  {"group 'layer.0' has no BACKWARD hold", "FORWARD x 1, piece 1 BACKWARD x 1"});
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_INVALID_STATE,
                  {"'layer.0' is still held", "piece 1 BACKWARD x 1", "call fsdp_reshard and fsdp_reshard_piece"});
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

TEST(Pieces, ThatTheGroupDoesNotHaveAreRefusedAsAreUnknownPhasesAndFlags) {
  each_rank(four_scenario(), [](Rank &rank) {
    require_error(fsdp_unshard_piece(rank.groups[0], 3, FSDP_FORWARD, 0, nullptr), FSDP_INVALID_ARGUMENT,
                  {"fsdp_unshard_piece: piece is 3, but group 'layer.0'", "0 to 2"});
    require_error(fsdp_reshard_piece(rank.groups[0], UINT32_MAX, FSDP_FORWARD, 0, nullptr), FSDP_INVALID_ARGUMENT,
                  {"fsdp_reshard_piece: piece is 4294967295"});
    require_error(fsdp_unshard_piece(rank.groups[0], 0, 9, 0, nullptr), FSDP_INVALID_ARGUMENT, {"phase"});
    require_error(fsdp_unshard_piece(rank.groups[0], 0, FSDP_FORWARD, 1, nullptr), FSDP_INVALID_ARGUMENT, {"flags"});
  });
}

TEST(Pieces, AreRefusedIfTheirNumbersDecreaseOrSkip) {
  const std::pair<std::vector<uint32_t>, const char *> wrong[] = {
      {{1}, "in piece 0"}, {{0, 2}, "must be 0 or 1"}, {{0, 1, 0}, "must be 1 or 2"}, {{0, UINT32_MAX}, "0 or 1"}};
  for (const auto &[pieces, words] : wrong) {
    Scenario scenario = four_scenario();
    for (size_t p = 0; p < pieces.size(); ++p) scenario.groups[0].params[p].piece = pieces[p];
    std::vector<std::string> errors;
    run_threads(
        scenario, [&](uint32_t, fsdp_context *context) { Rank(context, scenario, false); }, &errors);
    EXPECT_NE(errors[0].find(words), std::string::npos) << errors[0];
    EXPECT_NE(errors[0].find("piece"), std::string::npos) << errors[0];
  }
}

TEST(Pieces, ThatARankDividesOtherwiseFailTheSealWithMismatch) {
  for (const bool visits : {false, true}) {
    Scenario scenario = four_scenario();
    Scenario odd = scenario;
    odd.groups[0].params[2].piece = 2;
    if (visits) {
      odd = scenario;
      for (Scenario *const one : {&scenario, &odd}) {
        one->schedule = FSDP_SCHEDULE_VISITS;
        one->visits = visits_of_pieces(one->groups);
      }
      std::swap(odd.visits[0], odd.visits[1]);
    }
    std::vector<std::string> errors;
    run_threads(
        scenario, [&](uint32_t r, fsdp_context *context) { Rank(context, r ? odd : scenario); }, &errors);
    for (const std::string &error : errors) {
      EXPECT_NE(error.find("MISMATCH"), std::string::npos) << error;
      EXPECT_NE(error.find(visits ? "piece 0; rank 1 has visit" : "piece 2"), std::string::npos) << error;
    }
  }
}

TEST(Pieces, WithMuchPaddingAreLogged) {
  static std::mutex mutex;
  static std::string logged;
  logged.clear();
  Scenario scenario = four_scenario();
  scenario.groups[0].params[0].shape = {1};  // one of two ranks has it, and the other has padding
  scenario.context.log_level = FSDP_LOG_INFO;
  scenario.context.log = [](void *, fsdp_log_level, const char *text) {
    const std::lock_guard lock(mutex);
    logged += std::string(text) + "\n";
  };
  each_rank(scenario, [](Rank &) {});
  EXPECT_NE(logged.find("piece 0 of group 'layer.0' is padded by 1 to 2 elements"), std::string::npos) << logged;
  EXPECT_EQ(logged.find("piece 1 of group"), std::string::npos) << logged;
}

enum class Plan { by_group, visits_of_pieces, interleaved, any };

struct PieceCase {
  fsdp_strategy strategy;
  fsdp_unshard_mode mode;
  Plan plan;
  uint32_t ranks, replicas;
  bool holds_pieces, debug;
};

// The reference trains whole groups.
class PieceTraining : public testing::TestWithParam<PieceCase> {};

TEST_P(PieceTraining, HasTheBitsOfWholeGroups) {
  const PieceCase &given = GetParam();
  Scenario scenario = scenario_of(given.strategy, given.ranks, given.mode);
  scenario.groups = odd_pieces();
  scenario.microbatches = 2;
  scenario.eval = true;
  scenario.by_piece = given.holds_pieces;
  scenario.clip = 0.5;
  if (given.debug) scenario.context.flags = FSDP_CONTEXT_DEBUG;
  if (!given.debug) scenario.prefetch_small_groups();
  if (given.replicas > 1) {
    scenario.mesh.replicate_size = given.replicas;
    scenario.mesh.shard_size = given.ranks / given.replicas;
  }
  if (given.plan == Plan::interleaved) scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
  if (given.plan == Plan::any) scenario.schedule = FSDP_SCHEDULE_ANY, scenario.held_groups = 2;
  if (given.plan == Plan::visits_of_pieces) {
    scenario.schedule = FSDP_SCHEDULE_VISITS;
    scenario.visits = visits_of_pieces(scenario.groups);
  }
  const std::vector<Outcome> outcomes = train_threads(scenario);
  EXPECT_EQ(difference(scenario, outcomes), "");
  for (const Outcome &outcome : outcomes)
    EXPECT_EQ(outcome.stats.allocated_bytes, outcome.memory.role_bytes);  // a plan is kept to the byte
}

std::vector<PieceCase> piece_cases() {
  std::vector<PieceCase> cases;
  Sample sample(4);
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const Plan plan : {Plan::by_group, Plan::visits_of_pieces, Plan::interleaved, Plan::any})
        for (const auto &[ranks, replicas] : {std::pair{1u, 1u}, {3u, 1u}, {4u, 2u}})
          for (const bool holds_pieces : {true, false})
            for (const bool debug : {false, true}) {
              if (plan == Plan::visits_of_pieces && !holds_pieces) continue;  // the whole group has no buffer there
              if (on_gpu() && (mode == FSDP_UNSHARD_MAPPED || ranks == 1)) continue;  // there all weights are copied
              if (sample.takes_next()) cases.push_back({strategy, mode, plan, ranks, replicas, holds_pieces, debug});
            }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, PieceTraining, testing::ValuesIn(piece_cases()));

// A limit at which the groups' gradients are lent and reduced in parts, which cross pieces.
TEST(Pieces, OfGroupsWhoseGradientsAreReducedInPartsTrainTheSameBits) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  scenario.groups = odd_pieces();
  scenario.microbatches = 2;
  scenario.complete = scenario.by_piece = true;
  scenario.model.max_pending_bytes = 12'000;
  scenario.prefetch_small_groups();
  const std::vector<Outcome> outcomes = train_threads(scenario);
  EXPECT_EQ(difference(scenario, outcomes), "");
  EXPECT_LE(outcomes[0].memory.role_bytes[FSDP_ROLE_REDUCE], uint64_t{12'000 + 4096});
  EXPECT_EQ(outcomes[0].stats.allocated_bytes, outcomes[0].memory.role_bytes);
}

class PieceCheckpoint : public Checkpoint {};

// Three ranks save and two load, with and without pieces on each side, and with other pieces.
TEST_F(PieceCheckpoint, IsLoadedWithAnyOtherDivision) {
  const auto setup_of = [](uint32_t ranks, uint32_t divided) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = odd_pieces();
    for (GroupDef &group : setup.groups)
      for (uint32_t p = 0; p < group.params.size(); ++p) group.params[p].piece = divided == 2 ? p : p * divided / 2;
    return setup;
  };
  for (const auto &[writer, reader] : {std::pair{1u, 0u}, {0u, 1u}, {2u, 1u}}) {
    std::vector<std::vector<float>> saved;
    run(setup_of(3, writer), "saved", [&](Rank &rank) {
      rank.load();
      clean_step(rank, 0);
      FSDP(save(rank, path, 0, 0, 0));
      const auto all = everything(rank);
      if (rank.rank == 0) saved = all;
    });
    run(setup_of(2, reader), "loaded", [&](Rank &rank) {
      FSDP(load(rank, path));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      REQUIRE(same_bits(everything(rank), saved));
      clean_step(rank, 1);
    });
    fs::remove_all(path);
    fs::create_directory(path);
  }
}

// A reader that is late by 30 ms in each piece still sees what it saw first: no gather ahead writes there.
TEST(Pieces, LateReadersKeepTheirWeights) {
  Scenario scenario = four_scenario(FSDP_UNSHARD_COPIED, 3);
  scenario.model.flags = 0;
  scenario.prefetch_small_groups();
  scenario.by_piece = true;
  scenario.steps = 1;
  scenario.schedule = FSDP_SCHEDULE_VISITS;
  scenario.visits = visits_of_pieces(scenario.groups);
  scenario.visited = [](const Rank &rank, size_t g, fsdp_phase phase, bool held) {
    if (!held || rank.rank != 1) return;
    const auto look = [&] {
      std::vector<std::vector<float>> seen;
      fsdp_tensor tensor = FSDP_TENSOR_INIT;
      for (size_t p = 0; p < 4; ++p)
        if (fsdp_get_param(rank.groups[g], p, phase, &tensor) == FSDP_OK) seen.push_back(rank.view(g, p, phase));
      return seen;
    };
    const auto first = look();
    REQUIRE(!first.empty() && first.size() < 4);
    pause_ms(30);
    REQUIRE(look() == first);
  };
  EXPECT_EQ(difference(scenario, train_threads(scenario)), "");
}

TEST(Pieces, LoseTheirHoldsWhenTheStepIsDiscarded) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    each_rank(four_scenario(mode, 2), [](Rank &rank) {
      const auto weights = rank.read_all();
      FSDP(fsdp_unshard_piece(rank.groups[0], 0, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_reshard_piece(rank.groups[0], 0, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_unshard_piece(rank.groups[0], 1, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_discard_step(rank.model, nullptr));
      require_error(fsdp_reshard_piece(rank.groups[0], 1, FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
                    {"no FORWARD"});
      for (size_t g = 0; g < 2; ++g) {
        FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        for (size_t p = 0; p < 4; ++p) REQUIRE(rank.view(g, p, FSDP_FORWARD) == weights[rank.setup.ordinal(g, p)]);
        FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
      }
      clean_step(rank, 0);
      REQUIRE(rank.read_all() != weights);
    });
}

TEST(Pieces, ThatShareABufferAreRefusedToAWholeUnshard) {
  Scenario scenario = four_scenario();
  scenario.schedule = FSDP_SCHEDULE_VISITS;
  scenario.visits = visits_of_pieces(scenario.groups);
  each_rank(scenario, [](Rank &rank) {
    require_error(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
                  {"fsdp_unshard: group 'layer.0' (FORWARD)", "share a buffer", "add a visit of the whole group"});
    REQUIRE(rank.stats().gathered_groups == 0);
    FSDP(fsdp_unshard_piece(rank.groups[0], 0, FSDP_FORWARD, 0, nullptr));
    require_error(fsdp_unshard_piece(rank.groups[0], 1, FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
                  {"piece 1 of group 'layer.0' (FORWARD) needs the buffer that piece 0 of group 'layer.0' holds",
                   "with fsdp_reshard_piece first"});
    FSDP(fsdp_reshard_piece(rank.groups[0], 0, FSDP_FORWARD, 0, nullptr));
  });
  // A visit of the whole group, here the backward one, gives all pieces room at once.
  scenario.visits.erase(scenario.visits.begin() + 3, scenario.visits.end());
  scenario.visits.push_back({0, FSDP_BACKWARD, 0});
  each_rank(scenario, [](Rank &rank) {
    FSDP(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr));
  });
}

// Three pieces, of which neighbours are alive together, and the first and the last share a buffer.
TEST(Pieces, ThatShareABufferAreNotGatheredAheadWhole) {
  Scenario scenario = four_scenario(FSDP_UNSHARD_COPIED, 2);
  scenario.model.flags = 0;
  scenario.schedule = FSDP_SCHEDULE_VISITS;
  scenario.visits = visits_of_pieces(scenario.groups);
  each_rank(scenario, [](Rank &rank) {
    FSDP(fsdp_prefetch(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    REQUIRE(rank.stats().prefetches == 0 && rank.stats().gathered_groups == 0);
  });
}

// A group without parameters needs none of the buffers that FSDP_SCHEDULE_ANY has, and takes none from the others.
TEST(EmptyGroups, TakeNoBufferWhereTheOrderIsNotKnown) {
  for (const bool pieces : {false, true})
    for (const uint32_t held : {0u, 2u, 9u}) {
      Scenario scenario = four_scenario(FSDP_UNSHARD_COPIED, 3);
      scenario.schedule = FSDP_SCHEDULE_ANY;
      scenario.held_groups = held;
      scenario.groups.insert(scenario.groups.begin() + 1, GroupDef{"empty", {}});
      if (!pieces)
        for (GroupDef &group : scenario.groups)
          for (ParamDef &param : group.params) param.piece = 0;
      each_rank(scenario, [&](Rank &rank) {
        const auto weights = rank.read_all();
        const std::vector<size_t> order = held == 2 ? std::vector<size_t>{1, 0, 2} : std::vector<size_t>{1, 0, 2, 3};
        for (const size_t g : order) FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        for (const size_t g : order)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p)
            REQUIRE(rank.view(g, p, FSDP_FORWARD) == weights[rank.setup.ordinal(g, p)]);
        FSDP(fsdp_prefetch(rank.groups[1], FSDP_FORWARD, 0, nullptr));
        for (const size_t g : order) FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
      });
    }
}

// What a visit prefetches: the next piece, and after a group's last piece the next group's first.
TEST(Pieces, AreGatheredAheadInTheOrderOfTheirVisits) {
  Scenario scenario = four_scenario(FSDP_UNSHARD_COPIED, 2);
  scenario.model.flags = 0;
  scenario.prefetch_small_groups();
  scenario.schedule = FSDP_SCHEDULE_VISITS;
  scenario.visits = visits_of_pieces(scenario.groups);
  each_rank(scenario, [&](Rank &rank) {
    for (size_t i = 0; i < 6; ++i) {
      const fsdp_visit &visit = scenario.visits[i];
      const uint32_t piece = visit.piece - 1;
      const Stats before = rank.stats();
      FSDP(fsdp_unshard_piece(rank.groups[visit.group_index], piece, FSDP_FORWARD, 0, nullptr));
      const Stats after = rank.stats();
      REQUIRE(after.prefetches == before.prefetches + (i < 5));  // the last piece stays for its BACKWARD visit
      REQUIRE(after.gathers == before.gathers + (i == 0) + (i < 5));
      FSDP(fsdp_reshard_piece(rank.groups[visit.group_index], piece, FSDP_FORWARD, 0, nullptr));
    }
    REQUIRE(rank.stats().dropped_prefetches == 0);
  });
}

}  // namespace
