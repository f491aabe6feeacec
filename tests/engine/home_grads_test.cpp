// SPDX-License-Identifier: Apache-2.0
// Main gradients at home in a file, alone and with main weights and states. All results have the bits of a model in
// memory.
#include <gtest/gtest.h>

#include <barrier>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <mutex>

#include "../unit/system_faults.h"
#include "element.h"
#include "misuse.h"
#include "optimizer_memory.h"

using namespace harness;

namespace home_grads_test {
namespace {

using fsdp::test::FaultScope;
using fsdp::test::SystemFault;
using Way = SystemFault::Way;

constexpr Form fp32{"Float32", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW};

// Puts main grads in the file where they can be there. Bit 0 of `others` puts states there, too, and bit 1 main
// weights.
void take_home(Scenario &setup, size_t others, fsdp_home home = FSDP_HOME_FILE) {
  if (setup.model.strategy != FSDP_STRATEGY_NO_SHARD) setup.model.grad_home = home;
  if (others & 1) setup.model.state_home = home;
  if (others & 2 && setup.model.main_storage != FSDP_MAIN_NONE) setup.model.main_home = home;
  setup.model.home_directory = "/var/tmp";
  setup.model.turn_bytes = 65536;
}

Scenario scenario(const Form &form, const Layout &layout, size_t others, uint32_t microbatches) {
  Scenario setup = scenario_by(form, layout);
  setup.groups.push_back({"large",
                          {{"matrix", {151, 300}, FSDP_BFLOAT16},
                           {"vector", {9'011}, FSDP_BFLOAT16, FSDP_PARAM_NO_DECAY},
                           {"odd", {31, 259}, FSDP_BFLOAT16}}});
  setup.microbatches = microbatches;
  take_home(setup, others);
  return setup;
}

// NO_SHARD keeps main grads where peers read them.
std::vector<Layout> sharded_layouts() {
  std::vector<Layout> sharded;
  for (const Layout &layout : layouts)
    if (layout.strategy != FSDP_STRATEGY_NO_SHARD) sharded.push_back(layout);
  return sharded;
}

class HomeGrads : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(All, HomeGrads, testing::ValuesIn(sharded_layouts()),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(HomeGrads, HaveTheReferencesBits) {
  size_t others = 0;
  for (const uint32_t microbatches : {1u, 3u})
    for (const Form &form : {forms[2], fp32}) {
      const Scenario setup = scenario(form, GetParam(), others++, microbatches);
      EXPECT_EQ(difference(setup, train_threads(setup)), "") << form.name << " with " << microbatches;
    }
}

// Parts of a group are reduced by themselves when they are complete, or together at the end of a contribution. The
// outer axis then adds those of a whole group.
TEST_P(HomeGrads, OfPartsHaveTheReferencesBits) {
  if (GetParam().strategy == FSDP_STRATEGY_OPTIM) return;  // it reduces whole groups, at the end of a step
  for (const bool ends_late : {false, true})
    for (const bool complete : {false, true}) {
      Scenario setup = scenario(fp32, GetParam(), ends_late ? 0 : 3, 2);
      setup.model.reduce_policy = FSDP_REDUCE_POLICY_EACH;
      setup.model.max_pending_bytes = 200'000;
      setup.complete = complete;
      setup.ends_late = ends_late;
      EXPECT_EQ(difference(setup, train_threads(setup)), "") << ends_late << complete;
    }
}

TEST_P(HomeGrads, OfLateEndsHaveTheReferencesBits) {
  Scenario setup = scenario(forms[1], GetParam(), 1, 2);
  setup.ends_late = true;
  setup.scale = 0.3;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

// With FSDP_OUTER_OPTIM the slot of a rank is in pieces, one for each kind of rows, and two pieces may share a page.
TEST(HomeGradsInPieces, HaveTheReferencesBits) {
  using Shapes = std::vector<std::vector<uint64_t>>;
  for (const Layout &layout : {layouts[9], layouts[10], layouts[13]})
    for (const Shapes &shapes : {Shapes{{8, 1050}, {4, 600}}, Shapes{{4, 100}, {40, 700}}, Shapes{{2, 63}, {8, 3001}},
                                 Shapes{{4, 500}, {12, 1700}, {9, 333}}}) {
      Scenario setup = scenario_by(fp32, layout);
      setup.groups = {{"g", {}}};
      for (const std::vector<uint64_t> &shape : shapes)
        setup.groups[0].params.push_back({"p" + std::to_string(shape[1]), shape, FSDP_BFLOAT16});
      take_home(setup, shapes.size());
      EXPECT_EQ(difference(setup, train_threads(setup)), "") << layout.name << " " << shapes[0][1];
    }
}

TEST(HomeGradsOfProcesses, HaveTheReferencesBits) {
  const Scenario setup = scenario(forms[2], layouts[5], 3, 2);
  EXPECT_EQ(difference(setup, train_processes(setup)), "");
}

// Random delays of the streams' work. Without them the buffers are mostly free, and no stream has to wait.
TEST(HomeGradsWithDelays, HaveTheReferencesBits) {
  for (const Layout &layout : {layouts[6], layouts[9], layouts[11]}) {
    Scenario setup = scenario(fp32, layout, 0, 2);
    setup.context.debug_delay_us = 2000;
    setup.steps = 2;
    EXPECT_EQ(difference(setup, train_threads(setup)), "") << layout.name;
  }
}

TEST(HomeGradsOnTheHost, HaveTheReferencesBits) {
  for (const Layout &layout : {layouts[5], layouts[9], layouts[10]}) {
    Scenario setup = scenario_by(forms[2], layout);
    setup.microbatches = 2;
    take_home(setup, 3, FSDP_HOME_HOST);
    const auto outcomes = train_threads(setup);
    EXPECT_EQ(difference(setup, outcomes), "") << layout.name;
    EXPECT_EQ(outcomes[0].stats.allocated_bytes[FSDP_ROLE_HOME] > 0, on_gpu()) << layout.name;
  }
}

// Experts: two meshes, whose main grads are in one file of each rank.
TEST(HomeGradsOfMeshes, HaveTheBitsOfMemory) {
  Scenario setup = scenario_by(fp32, layouts[5]);
  setup.ranks = 4;
  setup.microbatches = 2;
  setup.groups = {{"shared", {{"w", {129, 48}, FSDP_BFLOAT16}}}, {"experts", {{"e", {97, 300}, FSDP_BFLOAT16}}}};
  setup.groups[1].meshes = 2;
  const std::vector<Outcome> in_memory = train_threads(setup);
  take_home(setup, 3);
  const std::vector<Outcome> in_file = train_threads(setup);
  for (uint32_t rank = 0; rank < setup.ranks; ++rank) {
    EXPECT_EQ(in_file[rank].error + in_memory[rank].error, "");
    EXPECT_FALSE(in_file[rank].weights.empty());
    EXPECT_TRUE(same_bits(in_file[rank].weights, in_memory[rank].weights)) << rank;
    EXPECT_EQ(in_file[rank].norms, in_memory[rank].norms) << rank;
  }
}

// ---- what calls of the window see ----

// Everything that `body` shows, on rank 0, with main grads in the file and in memory.
using Show = std::function<void(std::vector<float>)>;
void compare(const Scenario &setup, size_t others, const std::function<void(Rank &, const Show &)> &body) {
  std::vector<std::vector<float>> shown[2];
  for (const bool in_file : {false, true}) {
    Scenario own = setup;
    if (in_file) take_home(own, others);
    run_threads(own, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, own);
      rank.load();
      body(rank, [&](std::vector<float> values) {
        if (r == 0) shown[in_file].push_back(std::move(values));
      });
    });
  }
  EXPECT_FALSE(shown[0].empty());
  EXPECT_TRUE(same_bits(shown[0], shown[1]));
}

Scenario two_parameters(uint32_t ranks) {
  Scenario setup = one_parameter("w", 60'001, fp32, 0);
  setup.ranks = ranks;
  setup.groups[0].params.push_back({"x", {20'003}, FSDP_BFLOAT16});
  return setup;
}

std::vector<float> read_grad(Rank &rank, uint64_t param) {
  std::vector<float> values(rank.def(0).params[param].count());
  FSDP(fsdp_read_grad(rank.groups[0], param, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  return values;
}

std::vector<float> weights(Rank &rank) {
  std::vector<float> all;
  for (const auto &one : everything(rank)) all.insert(all.end(), one.begin(), one.end());
  return all;
}

// Each factor is rounded by itself, so the order of scalings is seen in the bits.
TEST(HomeGradsScaled, AreThoseInMemory) {
  for (const bool reads_between : {false, true})
    compare(two_parameters(2), 3, [&](Rank &rank, const Show &show) {
      for (uint32_t step = 0; step < 2; ++step) {
        finish_step(rank, step);
        FSDP(fsdp_scale_grads(rank.model, 0.3, stream()));
        double norm = 0;
        FSDP(fsdp_clip_grads(rank.model, nullptr, 0.01, stream(), &norm));
        show({static_cast<float>(norm)});
        if (reads_between)
          for (const uint64_t param : {0, 1}) show(read_grad(rank, param));
        FSDP(fsdp_scale_grads(rank.model, 0.7, stream()));
        std::vector<double> norms(2);
        FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms.data(), norms.size()));
        show({norms.begin(), norms.end()});
        update(rank);
        show(weights(rank));
      }
    });
}

TEST(HomeGradsCalls, CountLoadAndCheckAsInMemory) {
  compare(two_parameters(2), 0, [](Rank &rank, const Show &show) {
    std::vector<float> values(20'003);
    for (size_t i = 0; i < values.size(); ++i) values[i] = i % 3 ? 0.0F : static_cast<float>(i) / 512.0F;
    finish_step(rank, 0);
    FSDP(fsdp_scale_grads(rank.model, 0.1, stream()));
    FSDP(fsdp_load_grad(rank.groups[0], 1, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    uint64_t zeros = 0;
    FSDP(fsdp_count_zero_grads(rank.model, stream(), &zeros));
    EXPECT_GE(zeros, 13'000u);
    show({static_cast<float>(zeros)});
    int32_t found = -1;
    FSDP(fsdp_check_grads(rank.model, stream(), &found, nullptr));
    EXPECT_EQ(found, 0);
    for (const uint64_t param : {0, 1}) show(read_grad(rank, param));
    values[20'002] = std::numeric_limits<float>::infinity();
    FSDP(fsdp_load_grad(rank.groups[0], 1, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    const char *name = nullptr;
    FSDP(fsdp_check_grads(rank.model, stream(), &found, &name));
    EXPECT_EQ(found, 1);
    EXPECT_STREQ(name, "x");
    FSDP(fsdp_discard_step(rank.model, stream()));
    clean_step(rank, 1);
    show(weights(rank));
  });
}

TEST(HomeGradsUntrained, AreZeros) {
  compare(two_parameters(2), 1, [](Rank &rank, const Show &show) {
    clean_step(rank, 0);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    FSDP(fsdp_set_param_trainable(rank.groups[0], 1, 0));
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    for (const uint64_t param : {0, 1}) {
      show(read_grad(rank, param));
      EXPECT_EQ(read_grad(rank, param), std::vector<float>(rank.def(0).params[param].count(), 0.0F));
    }
    double norm = -1;
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
    EXPECT_EQ(norm, 0);
    update(rank);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 1, 1));
    const std::vector<float> values(rank.def(0).params[1].count(), 0.5F);
    const Placed placed(values);
    FSDP(fsdp_put_grad(rank.groups[0], 1, placed.data(), FSDP_FLOAT32, values.size(), 0, stream()));
    FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, stream()));
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    show(read_grad(rank, 1));
    update(rank);
    show(weights(rank));
  });
}

// A step that is given up has written some sums, which the next step overwrites.
TEST(HomeGradsOfADiscardedStep, AreNotAddedTo) {
  compare(two_parameters(3), 3, [](Rank &rank, const Show &show) {
    clean_step(rank, 0);
    forward(rank, nullptr);
    backward(rank, 1, 0, nullptr);
    FSDP(fsdp_discard_step(rank.model, stream()));
    clean_step(rank, 1);
    show(weights(rank));
  });
}

// ---- whole matrices ----

// Collects `source`, changes each matrix by its own numbers, and returns it to `target`.
void change_matrices(Rank &rank, const char *source, const char *target, fsdp_dtype dtype) {
  fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
  options.source = source, options.target = target, options.dtype = dtype;
  FSDP(fsdp_collect_matrices(rank.model, &options, stream()));
  fsdp_matrix given = FSDP_MATRIX_INIT;
  while (true) {
    FSDP(fsdp_next_matrix(rank.model, stream(), &given));
    if (!given.data) break;
    for (uint64_t m = 0; m < given.count; ++m) {
      auto *const data = static_cast<std::byte *>(given.data) + m * given.stride_bytes;
      std::vector<float> numbers = load_elements(data, given.dtype, given.rows * given.columns);
      const float first = numbers.front(), last = numbers.back();
      for (float &number : numbers) number = std::fabs(0.5F * number + 0.25F * first - 0.125F * last);
      store_elements(data, given.dtype, numbers);
    }
  }
  FSDP(fsdp_return_matrices(rank.model, stream()));
}

class HomeMatrices : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(All, HomeMatrices, testing::ValuesIn(layouts),
                         [](const auto &info) { return std::string(info.param.name); });

// Rows of few and of many pages, whose shards begin and end anywhere in a page.
TEST_P(HomeMatrices, OfTheFileHaveTheBitsOfMemory) {
  Scenario setup = scenario_by(fp32, GetParam());
  setup.groups = {{"a", {{"w", {67, 129}, FSDP_BFLOAT16}, {"v", {300}, FSDP_BFLOAT16}}},
                  {"b", {{"x", {3, 40, 96}, FSDP_BFLOAT16}, {"y", {130, 200}, FSDP_BFLOAT16}}}};
  for (GroupDef &group : setup.groups)
    for (ParamDef &param : group.params)
      if (param.shape.size() > 1) param.matrix = FSDP_MATRIX_LAST_TWO;
  setup.model.matrix_bytes = 104'192;  // the bytes of the largest matrix, so that there are several waves
  compare(setup, 3, [](Rank &rank, const Show &show) {
    for (uint32_t step = 0; step < 2; ++step) {
      finish_step(rank, step);
      FSDP(fsdp_scale_grads(rank.model, 0.7, stream()));
      change_matrices(rank, nullptr, nullptr, FSDP_BFLOAT16);
      change_matrices(rank, "exp_avg", nullptr, FSDP_FLOAT32);
      change_matrices(rank, nullptr, "exp_avg_sq", FSDP_FLOAT32);
      change_matrices(rank, "main_weight", nullptr, FSDP_FLOAT32);
      update(rank);
      show(weights(rank));
    }
  });
}

TEST(HomeMatricesFaults, AFailedReadOfRowsNamesThem) {
  Scenario setup = one_parameter("w", 4096, fp32, 0);
  setup.groups[0].params[0].shape = {64, 64};
  setup.groups[0].params[0].matrix = FSDP_MATRIX_LAST_TWO;
  take_home(setup, 1);
  std::vector<std::string> errors(2);
  std::barrier finished(2);
  std::optional<FaultScope> scope;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    finished.arrive_and_wait();
    if (r == 0) scope.emplace(SystemFault{Way::fails, 0, EIO, "pread"});
    finished.arrive_and_wait();
    try {
      change_matrices(rank, "exp_avg", nullptr, FSDP_FLOAT32);
    } catch (const std::exception &error) {
      errors[r] = error.what();
    }
  });
  for (const std::string &error : errors)
    for (const char *word :
         {"rows of matrices", "the file of home_directory '/var/tmp': reading", "Input/output error"})
      EXPECT_NE(error.find(word), std::string::npos) << error;
}

// The next step uses the other buffer, and its sums must not be overwritten by late ones of the step before.
TEST(HomeGradsOfADiscardedStep, AreNotWrittenLater) {
  compare(two_parameters(1), 0, [](Rank &rank, const Show &show) {
    clean_step(rank, 0);
    {
      const FaultScope scope({Way::waits, 0, 300, "pwrite"});
      forward(rank, nullptr);
      backward(rank, 1, 0, nullptr);
      FSDP(fsdp_discard_step(rank.model, stream()));
      clean_step(rank, 2);
    }
    show(weights(rank));
  });
}

// ---- memory and traffic ----

TEST(HomeGradsMemory, TheFileAndTwoBuffersHaveTheGrads) {
  constexpr uint64_t count = 100'000, plane = (count * 4 + 4095) / 4096 * 4096;
  Scenario setup = one_parameter("w", count, fp32, 0);
  setup.ranks = 1;
  take_home(setup, 0);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Memory memory = memory_of(rank.model, 0);
    EXPECT_EQ(memory.role_bytes[FSDP_ROLE_HOME], plane);
    EXPECT_EQ(memory.role_bytes[FSDP_ROLE_GRAD], 0u);
    EXPECT_GE(memory.role_bytes[FSDP_ROLE_STAGING], 2 * plane + 3 * 65536);
    for (const fsdp_shard &shard : rank.shards()) EXPECT_EQ(shard.main_grad, nullptr);
    const auto moved = [&](const std::function<void()> &body) {
      const Stats before = rank.stats();
      body();
      const Stats after = rank.stats();
      return std::pair(after.home_read_bytes - before.home_read_bytes,
                       after.home_written_bytes - before.home_written_bytes);
    };
    using Bytes = std::pair<uint64_t, uint64_t>;
    EXPECT_EQ(moved([&] { finish_step(rank, 0); }), Bytes(0, plane));
    EXPECT_EQ(moved([&] { update(rank); }), Bytes(plane, 0));
    // Another contribution reads and writes the sums once more, and so does each norm.
    EXPECT_EQ(moved([&] {
                put_all(rank, 0, 0.5F);
                FSDP(fsdp_reduce_grad(rank.groups[0], 0, stream()));
                finish_step(rank, 1);
              }),
              Bytes(plane, 2 * plane));
    double norm = 0;
    EXPECT_EQ(moved([&] { FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm)); }), Bytes(plane, 0));
    EXPECT_GT(norm, 0);
  });
}

// An update reads main grads and the planes that it changes, and writes only the planes that it changes.
TEST(HomeGradsMemory, AnUpdateDoesNotWriteThem) {
  constexpr uint64_t count = 100'000, plane = (count * 4 + 4095) / 4096 * 4096;
  Scenario setup = one_parameter("w", count, fp32, 0);
  setup.ranks = 1;
  take_home(setup, 3);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    const Stats before = rank.stats();
    update(rank);
    EXPECT_EQ(rank.stats().home_read_bytes - before.home_read_bytes, 4 * plane);
    EXPECT_EQ(rank.stats().home_written_bytes - before.home_written_bytes, 3 * plane);
  });
}

// ---- disks that fail ----

Scenario failing(uint32_t ranks) {
  Scenario setup = one_parameter("w", 100'000, fp32, 0);
  setup.ranks = ranks;
  setup.microbatches = 2;
  take_home(setup, 0);
  setup.context.timeout_ms = 20'000;
  return setup;
}

void two_contributions(Rank &rank, uint32_t step) {
  for (uint32_t m = 0; m < rank.setup.microbatches; ++m) {
    forward(rank, nullptr);
    backward(rank, step, m, nullptr);
  }
  FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
}

// Runs a step while the fault is in force, until a call fails. Returns the first error of each rank.
std::vector<std::string> errors_with(const Scenario &setup, const SystemFault &fault) {
  std::vector<std::string> errors(setup.ranks);
  std::optional<FaultScope> scope;
  std::mutex mutex;
  std::barrier updated(static_cast<std::ptrdiff_t>(setup.ranks));
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    two_contributions(rank, 0);
    update(rank);
    updated.arrive_and_wait();
    {
      const std::lock_guard lock(mutex);
      if (!scope) scope.emplace(fault);
    }
    try {
      two_contributions(rank, 1);
      double norm = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
      update(rank);
    } catch (const std::exception &error) {
      errors[r] = error.what();
      EXPECT_NE(fsdp_begin_update(rank.model, stream()), FSDP_OK);
    }
  });
  EXPECT_TRUE(scope->happened());
  return errors;
}

TEST(HomeGradsFaults, EachFailedCallNamesTheFileAndTheWayBack) {
  for (const char *call : {"pread", "pwrite"})
    for (int at = 0; at < (std::string_view(call) == "pread" ? 9 : 2); ++at)
      for (const std::string &error : errors_with(failing(2), {Way::fails, at, EIO, call}))
        for (const char *word : {"the file of home_directory '/var/tmp'", " bytes at ", "Input/output error", "rank ",
                                 "load the last checkpoint"})
          EXPECT_NE(error.find(word), std::string::npos) << call << " " << at << ": " << error;
  const std::string error = errors_with(failing(1), {Way::fails, 0, EIO, "pwrite"})[0];
  for (const char *word : {"rank 0: main grads", "writing", "load the last checkpoint"})
    EXPECT_NE(error.find(word), std::string::npos) << error;
}

// A rank gives up on its disk before its peers give up on the rank.
TEST(HomeGradsFaults, ADiskThatStandsStillIsATimeoutOfTheFileOnAllRanks) {
  for (const uint32_t ranks : {1u, 2u})
    for (const char *call : {"pread", "pwrite"}) {
      Scenario setup = failing(ranks);
      setup.context.timeout_ms = 300 + 700 * (ranks - 1);
      const auto before = std::chrono::steady_clock::now();
      for (const std::string &error : errors_with(setup, {Way::stands, 0, 0, call}))
        EXPECT_NE(error.find("the disk has moved no byte for "), std::string::npos) << ranks << call << error;
      EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(15));
    }
}

// A disk that moves bytes is waited for, however slow it is: three pieces of 8 MiB take longer than the timeout. On a
// busy machine, a piece may take 6 s more. Under ThreadSanitizer the sum of the gradient takes 1.3 s.
TEST(HomeGradsFaults, ASlowDiskIsNotATimeout) {
  Scenario setup = one_parameter("w", uint64_t{6} << 20, fp32, 0);
  setup.ranks = 1;
  setup.context.timeout_ms = 10'000;
  take_home(setup, 0);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const FaultScope scope({Way::waits, -1, 4000, "pwrite"});
    finish_step(rank, 0);
    EXPECT_TRUE(scope.happened());
  });
}

// The model ends although the disk blocks a thread.
TEST(HomeGradsFaults, AModelEndsWhileTheDiskStandsStill) {
  Scenario setup = failing(1);
  std::optional<FaultScope> scope;
  std::chrono::steady_clock::time_point ends;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    scope.emplace(SystemFault{Way::stands, 0, 0, "pwrite"});
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    ends = std::chrono::steady_clock::now();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - ends, std::chrono::seconds(10));
}

TEST(HomeGradsFaults, SlowCallsOfTheDiskChangeNoBit) {
  for (const char *call : {"pread", "pwrite"}) {
    Scenario setup = scenario(fp32, layouts[9], 0, 2);
    setup.steps = 1;
    std::vector<Outcome> outcomes;
    {
      const FaultScope scope({Way::waits, -1, 2, call});
      outcomes = train_threads(setup);
    }
    EXPECT_EQ(difference(setup, outcomes), "") << call;
  }
}

// The next contribution comes while the sums of the last are still being written by the other buffer's thread.
TEST(HomeGradsFaults, SumsAreReadAfterTheyAreWritten) {
  Scenario setup = failing(2);
  setup.microbatches = 3;
  setup.steps = 1;
  std::vector<Outcome> outcomes;
  {
    const FaultScope scope({Way::waits, -1, 50, "pwrite"});
    outcomes = train_threads(setup);
  }
  EXPECT_EQ(difference(setup, outcomes), "");
}

// ---- what is refused ----

TEST(HomeGradsMisuse, RanksWithOtherHomesDifferAtTheSeal) {
  std::vector<std::string> errors;
  run_threads(
      two_parameters(2),
      [&](uint32_t r, fsdp_context *context) {
        Scenario setup = two_parameters(2);
        if (r) take_home(setup, 0);
        const Rank rank(context, setup);
      },
      &errors);
  EXPECT_NE(errors.at(0).find("grad home 1"), std::string::npos) << errors.at(0);
  EXPECT_NE(errors.at(0).find("grad home 3"), std::string::npos) << errors.at(0);
}

}  // namespace
}  // namespace home_grads_test
