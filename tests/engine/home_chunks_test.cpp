// SPDX-License-Identifier: Apache-2.0
// The caller's own optimizer on shards at home in a file, chunk by chunk. All results have the bits of a model in
// memory.
#include <gtest/gtest.h>

#include <cerrno>
#include <map>

#include "../unit/system_faults.h"
#include "element.h"
#include "misuse.h"
#include "param_optimizer.h"

using namespace harness;

namespace home_chunks_test {
namespace {

using fsdp::test::FaultScope;
using fsdp::test::SystemFault;
using Way = SystemFault::Way;

constexpr uint64_t turn_bytes = 65536;

void take_home(Scenario &setup, bool main) {
  setup.model.state_home = FSDP_HOME_FILE;
  if (main) setup.model.main_home = FSDP_HOME_FILE;
  setup.model.home_directory = "/var/tmp";
  setup.model.turn_bytes = turn_bytes;
}

// The groups of param_optimizer.h, and one whose shards are several segments on every rank.
Scenario in_memory(const Form &form, const Layout &layout) {
  Scenario setup = mixed_scenario(form, layout);
  GroupDef large = {"large",
                    {{"matrix", {151, 300}, FSDP_BFLOAT16},
                     {"adamw", {9'011}, FSDP_BFLOAT16},
                     {"frozen", {31, 259}, FSDP_BFLOAT16, FSDP_PARAM_FROZEN},
                     {"odd", {101, 259}, FSDP_BFLOAT16}}};
  for (const size_t p : {0, 3}) large.params[p].optimizer = FSDP_OPTIMIZER_CALLER;
  setup.groups.push_back(large);
  return setup;
}

// Main weights of FSDP_MAIN_NONE are the compute weights, so only states are in the file.
Scenario in_file(const Form &form, const Layout &layout, bool main) {
  Scenario setup = in_memory(form, layout);
  take_home(setup, main && form.storage != FSDP_MAIN_NONE);
  if (main && layout.strategy != FSDP_STRATEGY_NO_SHARD) setup.model.grad_home = FSDP_HOME_FILE;
  return setup;
}

class HomeChunks : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(All, HomeChunks, testing::ValuesIn(layouts),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(HomeChunks, OwnOptimizersHaveTheReferencesBits) {
  Sample sample(3);
  for (const Form &form : {plain_form, forms[0], forms[3]})
    for (const bool main : {true, false}) {
      if (!sample.takes_next() || (main && form.storage == FSDP_MAIN_NONE)) continue;
      const Scenario setup = in_file(form, GetParam(), main);
      EXPECT_EQ(difference(setup, train_threads(setup)), "") << form.name << " " << main;
    }
}

// AdamW updates no parameter, and all states are the caller's.
TEST_P(HomeChunks, AnOwnOptimizerOfAllParametersHasTheReferencesBits) {
  Scenario setup = in_file({"", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_CALLER}, GetParam(), true);
  for (GroupDef &group : setup.groups)
    for (ParamDef &param : group.params)
      if (!(param.flags & FSDP_PARAM_FROZEN)) param.optimizer = FSDP_OPTIMIZER_CALLER;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

// Weights and states after three steps of which the second leaves a parameter as it is.
std::vector<std::vector<float>> train_some(const Scenario &setup) {
  std::vector<std::vector<float>> found;
  run(setup, "steps", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 3; ++step) {
      FSDP(fsdp_set_param_trainable(rank.groups[3], 3, step != 1));
      if (step != 1) {
        clean_step(rank, step);
        continue;
      }
      FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));  // gradients of zeros
      update(rank);
    }
    std::vector<std::vector<float>> all = rank.read_all();
    for (size_t g = 0; g < rank.groups.size(); ++g)
      for (size_t p = 0; p < rank.def(g).params.size(); ++p)
        if (rank.def(g).params[p].by_caller()) all.push_back(read_state(rank, g, p, "momentum"));
    if (rank.rank == 0) found = all;
  });
  return found;
}

TEST_P(HomeChunks, StatesHaveTheBitsOfMemory) {
  const Layout &layout = GetParam();
  const auto expected = train_some(in_memory(plain_form, layout));
  ASSERT_FALSE(expected.empty());
  EXPECT_TRUE(same_bits(train_some(in_file(plain_form, layout, true)), expected));
}

// ---- what a pass gives ----

using Elements = std::map<std::string, std::vector<uint8_t>>;

// How often each element of each parameter comes in a pass.
Elements count_given(const Rank &rank) {
  Elements given;
  fsdp_shard chunk = FSDP_SHARD_INIT;
  while (FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk)), chunk.element_count) {
    std::vector<uint8_t> &counts = given[chunk.name];
    counts.resize(std::max(counts.size(), size_t{chunk.element_offset + chunk.element_count}));
    for (uint64_t i = 0; i < chunk.element_count; ++i) ++counts[chunk.element_offset + i];
  }
  return given;
}

Elements expected_of(const Rank &rank, const std::vector<std::string> &names) {
  Elements expected;
  for (const fsdp_shard &shard : rank.shards()) {
    if (std::ranges::find(names, shard.name) == names.end()) continue;
    expected[shard.name].resize(shard.element_offset);
    expected[shard.name].resize(shard.element_offset + shard.element_count, 1);
  }
  return expected;
}

TEST_P(HomeChunks, EveryElementOfAnOwnParameterComesOnceInAPass) {
  run(in_file(plain_form, GetParam(), true), "pass", [](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) {
      finish_step(rank, step);
      const Elements expected = expected_of(rank, {"wte", "w1", "head", "matrix", "odd"});
      for (int pass = 0; pass < 2; ++pass) EXPECT_EQ(count_given(rank), expected) << "on rank " << rank.rank;
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
    }
  });
}

TEST(HomeChunksPass, LeavesOutUntrainedParametersAndThoseWithoutGradients) {
  Scenario setup = in_file(plain_form, layouts[5], true);
  setup.groups[3].params[3].missing_grad = FSDP_MISSING_GRAD_SKIP;
  run(setup, "kept", [](Rank &rank) {
    rank.load();
    FSDP(fsdp_set_param_trainable(rank.groups[3], 0, 0));
    FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));  // no rank gives "odd" a gradient
    EXPECT_EQ(count_given(rank), expected_of(rank, {"wte", "w1", "head"}));
    FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
    FSDP(fsdp_begin_update(rank.model, stream()));  // a window without gradients skips nothing
    EXPECT_EQ(count_given(rank), expected_of(rank, {"wte", "w1", "head", "odd"}));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// Bytes of the parameter and of its neighbour, of which AdamW updates one, are those of before.
TEST(HomeChunksPass, ThatWritesNothingChangesNothing) {
  run(in_file(plain_form, layouts[5], true), "unchanged", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const auto before = everything_of_two_optimizers(rank);
    FSDP(fsdp_begin_update(rank.model, stream()));
    EXPECT_FALSE(count_given(rank).empty());
    FSDP(fsdp_publish_weights(rank.model, stream()));
    EXPECT_TRUE(same_bits(everything_of_two_optimizers(rank), before));
  });
}

TEST(HomeChunksPass, GivesNothingOfAModelInMemory) {
  run(in_memory(plain_form, layouts[5]), "memory", [](Rank &rank) {
    rank.load();
    finish_step(rank, 0);
    EXPECT_TRUE(count_given(rank).empty());
    FSDP(fsdp_discard_step(rank.model, stream()));
  });
}

Scenario one_own(uint64_t rows, uint64_t columns) {
  Scenario setup = one_parameter("w", 1, {"", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_CALLER}, 0);
  setup.groups[0].params[0].shape = {rows, columns};
  setup.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  setup.ranks = 1;
  take_home(setup, true);
  return setup;
}

// Segments have 8192 elements of two planes in 64 KiB, so they begin and end inside rows of 300.
TEST(HomeChunksPass, AChunkTellsItsElementsAndRows) {
  run(one_own(100, 300), "rows", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const std::vector<float> weights = rank.read(0, 0), momentum = read_state(rank, 0, 0, "momentum");
    const fsdp_shard shard = rank.shards().at(0);
    finish_step(rank, 1);
    uint64_t first = 0;
    fsdp_shard chunk = FSDP_SHARD_INIT;
    while (FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk)), chunk.element_count) {
      fsdp_tensor state = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_shard_chunk_state(rank.model, "momentum", &state));
      EXPECT_EQ(chunk.element_offset, first);
      EXPECT_EQ(chunk.element_count, std::min<uint64_t>(8192, 30'000 - first));
      EXPECT_EQ(chunk.row_offset, first / 300);
      EXPECT_EQ(chunk.row_offset + chunk.row_count, (first + chunk.element_count + 299) / 300);
      EXPECT_EQ(chunk.main_grad, main_grad(shard) + first);
      EXPECT_EQ(std::tuple(chunk.group, chunk.param_index, chunk.main_weight_dtype, chunk.main_grad_dtype, chunk.flags,
                           chunk.state_count),
                std::tuple(shard.group, shard.param_index, shard.main_weight_dtype, shard.main_grad_dtype, shard.flags,
                           shard.state_count));
      EXPECT_EQ(std::tuple(state.element_count, state.dtype), std::tuple(chunk.element_count, FSDP_FLOAT32 + 0));
      const auto part = [&](const std::vector<float> &of) {
        return std::vector<float>(of.data() + first, of.data() + first + chunk.element_count);
      };
      EXPECT_EQ(load_elements(chunk.main_weight, FSDP_FLOAT32, chunk.element_count), part(weights));
      EXPECT_EQ(load_elements(state.data, FSDP_FLOAT32, chunk.element_count), part(momentum));
      first += chunk.element_count;
    }
    EXPECT_EQ(first, 30'000u);
    EXPECT_EQ(std::tuple(chunk.main_weight, chunk.main_grad, chunk.name), std::tuple(nullptr, nullptr, nullptr));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// A step reads and writes both planes once, and the publish reads main weights for the cast.
TEST(HomeChunksPass, ReadsAndWritesEachPlaneOnce) {
  run(one_own(100, 300), "bytes", [](Rank &rank) {
    rank.load();
    finish_step(rank, 0);
    const Stats before = rank.stats();
    update_chunks(rank);
    const Stats between = rank.stats();
    FSDP(fsdp_publish_weights(rank.model, stream()));
    const Stats after = rank.stats();
    constexpr uint64_t plane = (30'000 * 4 + 4095) / 4096 * 4096;
    EXPECT_EQ(between.home_read_bytes - before.home_read_bytes, 2 * plane);
    EXPECT_EQ(between.home_written_bytes - before.home_written_bytes, 2 * plane);
    EXPECT_EQ(after.home_read_bytes - between.home_read_bytes, plane);
    EXPECT_EQ(after.home_written_bytes - between.home_written_bytes, 0u);
  });
}

// If the step leaves a parameter unchanged, only the segment that it shares with another parameter is read.
TEST(HomeChunksPass, LeavesSegmentsOfUntrainedParametersInTheFile) {
  Scenario setup = one_own(100, 300);
  setup.groups[0].params.push_back(setup.groups[0].params[0]);
  setup.groups[0].params[1].name = "x";
  run(setup, "bytes", [](Rank &rank) {
    rank.load();
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    FSDP(fsdp_begin_update(rank.model, stream()));
    const Stats before = rank.stats();
    EXPECT_EQ(count_given(rank).size(), 1u);
    const Stats after = rank.stats();
    // 60,000 elements are 8 segments, and the second parameter begins in the fourth.
    constexpr uint64_t plane = ((60'000 - 3 * 8192) * 4 + 4095) / 4096 * 4096;
    EXPECT_EQ(after.home_read_bytes - before.home_read_bytes, 2 * plane);
    EXPECT_EQ(after.home_read_bytes - before.home_read_bytes, after.home_written_bytes - before.home_written_bytes);
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// ---- what is refused ----

TEST(HomeChunksMisuse, CallsInAPassNameTheCallThatEndsIt) {
  Scenario setup = in_file(plain_form, layouts[0], true);
  setup.groups[3].params[0].matrix = FSDP_MATRIX_LAST_TWO;
  run(setup, "refused", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    finish_step(rank, 1);
    fsdp_shard chunk = FSDP_SHARD_INIT;
    FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk));
    fsdp_model *const model = rank.model;
    fsdp_group *const group = rank.groups[3];
    std::vector<float> values(151 * 300);
    std::vector<double> norms(12);
    uint64_t count = 0;
    int32_t found = 0;
    const char *const next = "fsdp_next_shard_chunk until element_count is 0";
    const auto refuses = [&](const char *call, fsdp_status status) {
      require_error(status, FSDP_INVALID_STATE, {call, next});
    };
    const auto data = [&](auto call) { return call(group, 0, values.data(), FSDP_FLOAT32, values.size(), -1, 0); };
    const auto state = [&](auto call) {
      return call(group, 0, "momentum", values.data(), FSDP_FLOAT32, values.size(), -1, 0);
    };
    const fsdp_matrix_options matrices = FSDP_MATRIX_OPTIONS_INIT;
    refuses("fsdp_publish_weights", fsdp_publish_weights(model, stream()));
    refuses("fsdp_step_adamw", fsdp_step_adamw(model, 0.1, nullptr, stream()));
    refuses("fsdp_discard_step", fsdp_discard_step(model, stream()));
    refuses("fsdp_read_param", data(fsdp_read_param));
    refuses("fsdp_load_param", data(fsdp_load_param));
    refuses("fsdp_read_grad", data(fsdp_read_grad));
    refuses("fsdp_load_grad", data(fsdp_load_grad));
    refuses("fsdp_read_state", state(fsdp_read_state));
    refuses("fsdp_load_state", state(fsdp_load_state));
    refuses("fsdp_load_chunk", fsdp_load_chunk(group, 0, values.data(), FSDP_FLOAT32, 0, 1, 0));
    refuses("fsdp_load", fsdp_load(model, "folder", nullptr, nullptr));
    refuses("fsdp_collect_matrices", fsdp_collect_matrices(model, &matrices, stream()));
    refuses("fsdp_scale_grads", fsdp_scale_grads(model, 0.5, stream()));
    refuses("fsdp_clip_grads", fsdp_clip_grads(model, nullptr, 1, stream(), nullptr));
    refuses("fsdp_get_grad_norm", fsdp_get_grad_norm(model, nullptr, stream(), nullptr));
    refuses("fsdp_get_param_grad_norms", fsdp_get_param_grad_norms(model, stream(), norms.data(), norms.size()));
    refuses("fsdp_get_param_weight_norms", fsdp_get_param_weight_norms(model, stream(), norms.data(), norms.size()));
    refuses("fsdp_count_zero_grads", fsdp_count_zero_grads(model, stream(), &count));
    refuses("fsdp_check_grads", fsdp_check_grads(model, stream(), &found, nullptr));
    refuses("fsdp_set_param_trainable", fsdp_set_param_trainable(group, 0, 0));
    require_error(fsdp_close_context(rank.context), FSDP_INVALID_STATE, {"chunks of shards"});
    while (chunk.element_count) FSDP(fsdp_next_shard_chunk(model, stream(), &chunk));
    FSDP(fsdp_get_grad_norm(model, nullptr, stream(), nullptr));
    FSDP(fsdp_step_adamw(model, 0.1, nullptr, stream()));
  });
}

TEST(HomeChunksMisuse, ChunksAreForTheUpdateWindow) {
  Scenario setup = in_file(plain_form, layouts[0], true);
  setup.groups[3].params[0].matrix = FSDP_MATRIX_LAST_TWO;
  run(setup, "window", [](Rank &rank) {
    rank.load();
    fsdp_shard chunk = FSDP_SHARD_INIT;
    fsdp_tensor state = FSDP_TENSOR_INIT;
    const auto next = [&] { return fsdp_next_shard_chunk(rank.model, stream(), &chunk); };
    const auto find = [&](const char *name) { return fsdp_get_shard_chunk_state(rank.model, name, &state); };
    require_error(next(), FSDP_INVALID_STATE, {"fsdp_next_shard_chunk: the update window is closed"});
    require_error(find("momentum"), FSDP_INVALID_STATE, {"fsdp_get_shard_chunk_state: the update window is closed"});
    finish_step(rank, 0);
    require_error(find("momentum"), FSDP_INVALID_STATE, {"no chunk", "call fsdp_next_shard_chunk first"});
    fsdp_matrix_options matrices = FSDP_MATRIX_OPTIONS_INIT;
    FSDP(fsdp_collect_matrices(rank.model, &matrices, stream()));
    require_error(next(), FSDP_INVALID_STATE, {"fsdp_next_shard_chunk: matrices", "fsdp_return_matrices"});
    fsdp_matrix given = FSDP_MATRIX_INIT;
    do FSDP(fsdp_next_matrix(rank.model, stream(), &given));
    while (given.data);
    FSDP(fsdp_return_matrices(rank.model, stream()));
    FSDP(next());
    require_error(find("exp_avg"), FSDP_INVALID_ARGUMENT,
                  {"fsdp_get_shard_chunk_state: the shard of 'wte' has no optimizer state 'exp_avg'", "'momentum'"});
    require_error(find("momentum.absmax"), FSDP_INVALID_ARGUMENT, {"momentum.absmax"});
    require_error(find(nullptr), FSDP_INVALID_ARGUMENT, {"name is NULL"});
    require_error(fsdp_get_shard_chunk_state(rank.model, "momentum", nullptr), FSDP_INVALID_ARGUMENT, {"fsdp_tensor"});
    require_error(fsdp_next_shard_chunk(rank.model, stream(), nullptr), FSDP_INVALID_ARGUMENT, {"fsdp_shard"});
    FSDP(find("momentum"));
    while (chunk.element_count) FSDP(next());
    require_error(find("momentum"), FSDP_INVALID_STATE, {"no chunk"});
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, stream()));
  });
}

// Once a chunk was given, weights may have been written that a discard cannot restore.
TEST(HomeChunksMisuse, AStepIsNotDiscardedOnceAChunkWasGiven) {
  run(in_file(plain_form, layouts[5], true), "discard", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    finish_step(rank, 1);
    FSDP(fsdp_discard_step(rank.model, stream()));
    finish_step(rank, 1);
    fsdp_shard chunk = FSDP_SHARD_INIT;
    FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk));
    require_error(fsdp_discard_step(rank.model, stream()), FSDP_INVALID_STATE, {"fsdp_next_shard_chunk until"});
    while (chunk.element_count) FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk));
    require_error(fsdp_discard_step(rank.model, stream()), FSDP_INVALID_STATE,
                  {"chunks of shards were given", "call fsdp_publish_weights"});
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, stream()));
    finish_step(rank, 2);
    FSDP(fsdp_discard_step(rank.model, stream()));  // the next step can be discarded
  });
}

// One rank gives the step up, and the other has written its weights: no version can be trusted.
TEST(HomeChunksMisuse, AMismatchAfterAChunkIsFatal) {
  for (const bool gives : {false, true}) {
    const Scenario setup = in_file(plain_form, layouts[2], true);
    std::vector<std::string> errors(2);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      clean_step(rank, 0);
      finish_step(rank, 1);
      if (r == 0 && gives) update_chunks(rank);
      const fsdp_status status =
          r == 0 ? fsdp_step_adamw(rank.model, 0.1, nullptr, stream()) : fsdp_discard_step(rank.model, stream());
      if (status != FSDP_OK) errors[r] = last_message();
      if (r == 0 && !gives) FSDP(fsdp_discard_step(rank.model, stream()));
      fsdp_error error = FSDP_ERROR_INIT;
      FSDP(fsdp_get_context_error(context, &error));
      EXPECT_EQ(error.status != FSDP_OK, gives) << r << ": " << error.message;
    });
    EXPECT_EQ(errors[0].find("main weights may have been written here") != std::string::npos, gives) << errors[0];
    EXPECT_EQ(errors[1].empty(), !gives) << errors[1];
  }
}

TEST(HomeChunksMisuse, AModelMayEndInTheMiddleOfAPass) {
  const Scenario setup = in_file(plain_form, layouts[2], true);
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        finish_step(rank, 0);
        fsdp_shard chunk = FSDP_SHARD_INIT;
        FSDP(fsdp_next_shard_chunk(rank.model, stream(), &chunk));
        REQUIRE(chunk.element_count > 0);
      },
      &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "");
}

// ---- disks that fail ----

TEST(HomeChunksFaults, AnErrorOfTheDiskInAPassFailsTheContext) {
  const Scenario setup = one_own(100, 300);
  for (const char *call : {"pread", "pwrite"})
    for (int at = 0; at < 2 * 4; at += 3)
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        finish_step(rank, 0);
        const FaultScope scope({Way::fails, at, EIO, call});
        fsdp_shard chunk = FSDP_SHARD_INIT;
        fsdp_status status = FSDP_OK;
        do status = fsdp_next_shard_chunk(rank.model, stream(), &chunk);
        while (status == FSDP_OK && chunk.element_count);
        EXPECT_TRUE(misuse::fails(status, FSDP_SYSTEM,
                                  {"fsdp_next_shard_chunk: rank 0: the file of home_directory '/var/tmp'",
                                   std::string_view(call) == "pread" ? "reading" : "writing", "the context has failed",
                                   "load the last checkpoint"}))
            << call << " " << at;
        EXPECT_TRUE(scope.happened());
        EXPECT_NE(fsdp_publish_weights(rank.model, stream()), FSDP_OK);
      });
}

TEST(HomeChunksFaults, SlowCallsOfTheDiskChangeNoBit) {
  const Scenario setup = in_file(plain_form, layouts[2], true);
  for (const char *call : {"pread", "pwrite"}) {
    std::vector<Outcome> outcomes;
    {
      const FaultScope scope({Way::waits, -1, 2, call});
      outcomes = train_threads(setup);
    }
    EXPECT_EQ(difference(setup, outcomes), "") << call;
  }
}

}  // namespace
}  // namespace home_chunks_test
