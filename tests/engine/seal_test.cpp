// SPDX-License-Identifier: Apache-2.0
// If ranks declare different models, all of them get an error at the seal, soon and with both values, and can go on.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "harness.h"

using namespace harness;

namespace {

struct Declaration {
  Scenario scenario;
  std::vector<std::string> states;
};

// One difference in the odd rank's declaration, and how the message shows both values.
struct Case {
  const char *name;
  void (*change)(Declaration &);
  const char *usual;
  const char *odd;
};

Declaration usual_declaration(uint32_t ranks) {
  Declaration declaration;
  declaration.scenario.ranks = ranks;
  declaration.scenario.model.optimizer = FSDP_OPTIMIZER_CALLER;
  declaration.scenario.groups = odd_groups();
  declaration.states = {"momentum"};
  return declaration;
}

const Case cases[] = {
    {"ParameterName", [](Declaration &d) { d.scenario.groups[1].params[2].name = "l0.other"; }, "parameter 'l0.w1'",
     "parameter 'l0.other'"},
    {"OrderOfParameters",
     [](Declaration &d) { std::swap(d.scenario.groups[1].params[0], d.scenario.groups[1].params[1]); },
     "parameter 'l0.wq'", "parameter 'l0.bias'"},
    {"OrderOfGroups", [](Declaration &d) { std::swap(d.scenario.groups[1], d.scenario.groups[2]); }, "group 'layer.0'",
     "group 'layer.1'"},
    {"GroupName", [](Declaration &d) { d.scenario.groups[3].name = "tail"; }, "group 'head'", "group 'tail'"},
    {"Shape",
     [](Declaration &d) {
       d.scenario.groups[1].params[2].shape = {24, 51};
     },
     "[51, 24]", "[24, 51]"},
    {"Dimensions", [](Declaration &d) { d.scenario.groups[0].params[0].shape = {37 * 24}; }, "[37, 24]", "[888]"},
    {"Box",
     [](Declaration &d) {
       d.scenario.groups[1].params[2].global_shape = {102, 24};
       d.scenario.groups[1].params[2].global_offset = {51, 0};
     },
     "shape [51, 24], dtype", "shape [51, 24] from [51, 0] on of [102, 24], dtype"},
    {"Dtype", [](Declaration &d) { d.scenario.groups[2].params[1].dtype = FSDP_BFLOAT16; }, "dtype float32",
     "dtype bfloat16"},
    {"ParameterFlag", [](Declaration &d) { d.scenario.groups[1].params[0].flags = FSDP_PARAM_NO_DECAY; }, "flags 0x0",
     "flags 0x4000"},
    {"Frozen", [](Declaration &d) { d.scenario.groups[1].params[0].flags = FSDP_PARAM_FROZEN; }, "flags 0x0",
     "flags 0x2000"},
    {"Granule", [](Declaration &d) { d.scenario.groups[3].params[0].granule = FSDP_GRANULE_ROW; }, "granule 3",
     "granule 1"},
    {"GranuleRows", [](Declaration &d) { d.scenario.groups[2].params[2].granule_rows = 16; }, "granule 2 x 32",
     "granule 2 x 16"},
    {"RowDimensions", [](Declaration &d) { d.scenario.groups[1].params[0].row_dimensions = 2; }, "parameter 'l0.wq'",
     "row_dimensions 2"},
    {"LearningRateScale", [](Declaration &d) { d.scenario.groups[3].params[1].lr_scale = 0.25; }, "lr_scale 0.5",
     "lr_scale 0.25"},
    {"MissingGrad", [](Declaration &d) { d.scenario.groups[3].params[1].missing_grad = FSDP_MISSING_GRAD_SKIP; },
     "lr_scale 0.5", "FSDP_MISSING_GRAD_SKIP"},
    {"StrategyOfAGroup", [](Declaration &d) { d.scenario.groups[2].options.strategy = FSDP_STRATEGY_OPTIM_GRADS; },
     "strategy 4", "strategy 3"},
    {"Resident", [](Declaration &d) { d.scenario.groups[0].options.flags = FSDP_GROUP_RESIDENT; }, "resident false",
     "resident true"},
    {"GradDtype", [](Declaration &d) { d.scenario.model.grad_dtype = FSDP_BFLOAT16; }, "grad dtype 0", "grad dtype 2"},
    {"ReduceDtypeOfAGroup", [](Declaration &d) { d.scenario.groups[3].options.reduce_dtype = FSDP_BFLOAT16; },
     "reduce dtype 0", "reduce dtype 2"},
    {"Prefetch", [](Declaration &d) { d.scenario.model.prefetch_depth = 2; }, "prefetch depth 1", "prefetch depth 2"},
    {"NoPrefetch", [](Declaration &d) { d.scenario.model.flags = FSDP_MODEL_NO_PREFETCH; }, "prefetch depth 1",
     "prefetch depth 0"},
    {"NoPrefetchOfItsOwn",
     [](Declaration &d) { d.scenario.model.flags = FSDP_MODEL_NO_PREFETCH, d.scenario.model.prefetch_depth = 1; },
     "prefetches true", "prefetches false"},
    {"PendingGroups", [](Declaration &d) { d.scenario.model.max_pending_groups = 3; }, "max pending groups 2",
     "max pending groups 3"},
    {"PendingBytes", [](Declaration &d) { d.scenario.model.max_pending_bytes = 1 << 20; }, "max pending bytes 0",
     "max pending bytes 1048576"},
    {"MainStorage", [](Declaration &d) { d.scenario.model.main_storage = FSDP_MAIN_NONE; }, "main storage 1",
     "main storage 3"},
    {"MainStorageOfAGroup", [](Declaration &d) { d.scenario.groups[2].options.main_storage = FSDP_MAIN_NONE; },
     "main storage 1", "main storage 3"},
    {"RoundingSeed", [](Declaration &d) { d.scenario.model.rounding_seed = 7; }, "rounding seed 0", "rounding seed 7"},
    {"UnshardMode", [](Declaration &d) { d.scenario.model.unshard_mode = FSDP_UNSHARD_COPIED; }, "unshard mode 1",
     "unshard mode 2"},
    {"Views", [](Declaration &d) { d.scenario.model.view_kind = FSDP_VIEWS_PRIVATE; }, "private views false",
     "private views true"},
    {"GradOp", [](Declaration &d) { d.scenario.model.grad_op = FSDP_GRAD_OP_SUM; }, "grad op 1", "grad op 2"},
    {"Schedule", [](Declaration &d) { d.scenario.schedule = FSDP_SCHEDULE_INTERLEAVED; }, "schedule: kind 1",
     "schedule: kind 2"},
    {"StateName", [](Declaration &d) { d.states = {"velocity"}; }, "'momentum'", "'velocity'"},
    {"OneStateMore", [](Declaration &d) { d.states.push_back("velocity"); }, "group 'embed'", "'velocity'"},
    {"OneGroupMore",
     [](Declaration &d) {
       d.scenario.groups.push_back({"extra", {{"extra.w", {5, 5}}}});
     },
     "number of groups: 4", "group 'extra'"},
    {"OneGroupLess", [](Declaration &d) { d.scenario.groups.pop_back(); }, "group 'head'", "number of groups: 3"},
    {"NoGroup", [](Declaration &d) { d.scenario.groups.clear(); }, "group 'embed'", "number of groups: 0"},
    {"OneParameterMore",
     [](Declaration &d) {
       d.scenario.groups[0].params.push_back({"embed.b", {24}});
     },
     "group 'layer.0'", "parameter 'embed.b'"},
    {"OneParameterLess", [](Declaration &d) { d.scenario.groups[3].params.pop_back(); }, "parameter 'head.norm'",
     "number of groups: 4"},
    // Its plan fails too: no backward visits.
    {"ScheduleThatCannotBePlanned",
     [](Declaration &d) {
       d.scenario.schedule = FSDP_SCHEDULE_VISITS;
       d.scenario.visits = {{0, FSDP_FORWARD, 0}};
     },
     "schedule: kind 1", "schedule: kind 3"},
    {"HeldGroups",
     [](Declaration &d) {
       d.scenario.schedule = FSDP_SCHEDULE_ANY;
       d.scenario.held_groups = 7;
     },
     "schedule: kind 1, 0 visits, 0 held groups", "schedule: kind 4, 0 visits, 7 held groups"},
};

// What the ranks of a world tell each other, in memory that processes may share.
struct Board {
  std::atomic<double> arrivals[std::size(cases)][4];
  std::atomic<int> returned[std::size(cases)];
  std::atomic<double> slowest;
};

// All ranks but one declare the usual model; the late rank comes after `late_ms`.
void disagree(uint32_t rank, uint32_t ranks, fsdp_context *context, size_t index, uint32_t odd, uint32_t late,
              int late_ms, uint32_t sealed, Board &board) {
  const Case &test = cases[index];
  Declaration mine = usual_declaration(ranks);
  if (rank == odd) test.change(mine);
  Rank self(context, mine.scenario, false);
  for (const std::string &state : mine.states) FSDP(fsdp_add_optimizer_state(self.model, state.c_str(), FSDP_FLOAT32));
  if (rank == late) pause_ms(late_ms);
  board.arrivals[index][rank] = now();
  const fsdp_status status = fsdp_seal_model(self.model);
  const double returned = now();
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(context, &error);
  const std::string message = error.message,
                    where = std::string(test.name) + ", odd rank " + std::to_string(odd) + ": ";
  if (status != FSDP_MISMATCH) throw std::runtime_error(where + fsdp_get_status_name(status) + ": " + message);
  // Rank 0 is what others are measured by.
  const uint32_t blamed = odd ? odd : 1;
  const auto says = [&](uint32_t of) { return "rank " + std::to_string(of) + " has "; };
  const auto at = [&](const std::string &part) { return message.find(part); };
  const bool right = error.rank == static_cast<int32_t>(blamed) && at(says(0)) < at(says(blamed)) &&
                     at(says(blamed)) != message.npos && at(odd ? test.usual : test.odd) < at(says(blamed)) &&
                     message.find(odd ? test.odd : test.usual, at(says(blamed))) != message.npos;
  if (message.find("fsdp_seal_model: model " + std::to_string(sealed) + ": ") != 0)
    throw std::runtime_error(where + message);
  if (!right || error.context_failed) throw std::runtime_error(where + message);
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  if (!self.groups.empty()) REQUIRE(fsdp_get_param(self.groups[0], 0, FSDP_FORWARD, &tensor) == FSDP_INVALID_STATE);
  ++board.returned[index];
  while (board.returned[index] < static_cast<int>(ranks)) {  // a rank that failed the test leaves the others here
    fsdp_error failed = FSDP_ERROR_INIT;
    FSDP(fsdp_get_context_error(context, &failed));
    if (failed.status) throw std::runtime_error("its test body failed elsewhere");
    if (now() - returned > 20) throw std::runtime_error(where + "not all ranks returned from the seal");
    pause_ms(1);
  }
  double last = 0;
  for (uint32_t r = 0; r < ranks; ++r) last = std::max(last, board.arrivals[index][r].load());
  if (returned - last >= 2.0)
    throw std::runtime_error(where + "the seal returned after " + std::to_string(returned - last) + " s");
  double slowest = board.slowest;
  while (returned - last > slowest && !board.slowest.compare_exchange_weak(slowest, returned - last)) {
  }
}

Scenario clean_scenario(uint32_t ranks) {
  Scenario scenario;
  scenario.ranks = ranks;
  scenario.groups = odd_groups();
  return scenario;
}

void train_clean(fsdp_context *context, const Scenario &scenario, const std::vector<std::vector<float>> &expected) {
  Rank rank(context, scenario);
  Outcome outcome;
  train(rank, outcome);
  REQUIRE(same_bits(outcome.weights, expected));
}

void disagree_about_all(uint32_t rank, uint32_t ranks, fsdp_context *context, size_t step, Board &board,
                        const Scenario &clean, const std::vector<std::vector<float>> &expected) {
  uint32_t sealed = 0;  // so many models of these ranks were sealed before
  for (size_t i = 0; i < std::size(cases); i += step) {
    const auto odd = static_cast<uint32_t>(i / step % ranks), late = static_cast<uint32_t>((i / step / 2) % ranks);
    disagree(rank, ranks, context, i, odd, late, i % 8 == 0 ? 300 : 10, sealed, board);
    if (i / step % 5 == 0) train_clean(context, clean, expected), ++sealed;
  }
  train_clean(context, clean, expected);
  FSDP(fsdp_close_context(context));
}

class Seal : public testing::TestWithParam<uint32_t> {};

TEST_P(Seal, EveryDifferenceIsReportedToAllThreadsAndTheContextGoesOn) {
  const uint32_t ranks = GetParam();
  const Scenario clean = clean_scenario(ranks);
  const auto expected = reference(clean).weights;
  Board board{};
  run_threads(clean, [&](uint32_t rank, fsdp_context *context) {
    disagree_about_all(rank, ranks, context, 1, board, clean, expected);
  });
  printf("slowest report after the last arrival, %u threads: %.1f ms\n", ranks, 1e3 * board.slowest);
}

TEST_P(Seal, DifferenceIsReportedToProcessesAsToThreads) {
  const uint32_t ranks = GetParam();
  const Scenario clean = clean_scenario(ranks);
  const auto expected = reference(clean).weights;
  void *shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto &board = *new (shared) Board{};
  const std::string rendezvous = "seal-" + std::to_string(::getpid()) + "-" + std::to_string(ranks);
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) try {
        fsdp_context *context = join(clean, rank, rendezvous);
        disagree_about_all(rank, ranks, context, 4, board, clean, expected);
        fsdp_destroy_context(context);
        ::_exit(0);
      } catch (const std::exception &error) {
        fprintf(stderr, "rank %u: %s\n", rank, error.what());
        ::_exit(1);
      }
    children.push_back(pid);
  }
  const double deadline = now() + 60;
  for (const pid_t pid : children) {
    int status = 0;
    pid_t ended = 0;
    while (!(ended = ::waitpid(pid, &status, WNOHANG)) && now() < deadline) pause_ms(2);
    if (!ended) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      ADD_FAILURE() << "a rank hangs";
    }
    EXPECT_EQ(status, 0);
  }
  printf("slowest report after the last arrival, %u processes: %.1f ms\n", ranks, 1e3 * board.slowest);
  ::munmap(shared, sizeof(Board));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Seal, testing::Values(2u, 4u));

// The lowest rank that differs is told, on every rank.
TEST(SealOfSeveral, TheLowestOfTwoOddRanksIsNamed) {
  const Scenario clean = clean_scenario(4);
  run_threads(clean, [&](uint32_t r, fsdp_context *context) {
    {
      Scenario mine = clean;
      if (r == 1) mine.groups[2].params[0].lr_scale = 3;
      if (r == 3) mine.groups[0].params[0].name = "other";
      Rank self(context, mine, false);
      REQUIRE(fsdp_seal_model(self.model) == FSDP_MISMATCH);
      fsdp_error error = FSDP_ERROR_INIT;
      fsdp_get_last_error(context, &error);
      REQUIRE(error.rank == 1);
      REQUIRE(std::string(error.message).find("lr_scale 3") != std::string::npos);
      // The same model again: the same answer, no wait.
      REQUIRE(fsdp_seal_model(self.model) == FSDP_MISMATCH);
    }
    Rank good(context, clean);
    good.load();
    FSDP(fsdp_close_context(context));
  });
}

// Every gradient is multiplied by it, so the weights of ranks with different factors would drift apart. The factor is
// the model's or a group's own.
class GradientFactors : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(SealOfSeveral, GradientFactors, testing::Bool());

TEST_P(GradientFactors, OtherFactorsAreNamed) {
  Scenario clean = clean_scenario(3);
  const bool of_group = GetParam();
  const auto set = [&](Scenario &setup, double factor) {
    (of_group ? setup.groups[1].options.grad_op : setup.model.grad_op) = FSDP_GRAD_OP_FACTOR;
    (of_group ? setup.groups[1].options.grad_factor : setup.model.grad_factor) = factor;
  };
  set(clean, 0.5);
  run_threads(clean, [&](uint32_t r, fsdp_context *context) {
    {
      Scenario mine = clean;
      if (r == 2) set(mine, 0.25);
      Rank self(context, mine, false);
      require_error(fsdp_seal_model(self.model), FSDP_MISMATCH,
                    {"rank 0 has", "grad factor 0.5", "rank 2 has", "grad factor 0.25"});
    }
    Rank good(context, clean);
    good.load();
    FSDP(fsdp_close_context(context));
  });
}

// Long names must not push the second rank's value out of the message.
TEST(SealOfSeveral, LongNamesAreBothShown) {
  Scenario clean = clean_scenario(2);
  const std::string stem(245, 'n');
  clean.groups[0].name = stem + "group";
  clean.groups[0].params[0].name = stem + "weight";
  run_threads(clean, [&](uint32_t r, fsdp_context *context) {
    Scenario mine = clean;
    if (r == 1) mine.groups[0].params[0].lr_scale = 0.125;
    Rank self(context, mine, false);
    REQUIRE(fsdp_seal_model(self.model) == FSDP_MISMATCH);
    REQUIRE(last_message().find("lr_scale 1") != std::string::npos);
    REQUIRE(last_message().find("lr_scale 0.125") != std::string::npos);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
