// SPDX-License-Identifier: Apache-2.0
// Main weights and states at home in a file. All results have the bits of a model in memory.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "element.h"
#include "misuse.h"
#include "optimizer_memory.h"

using namespace harness;

namespace home_test {
namespace {

constexpr Form fp32{"Float32", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW};
constexpr const char *directory = "/var/tmp";

enum class Homes { state, main, both };

void take_home(Scenario &setup, Homes homes, const char *where = directory) {
  if (homes != Homes::main) setup.model.state_home = FSDP_HOME_FILE;
  if (homes != Homes::state) setup.model.main_home = FSDP_HOME_FILE;
  setup.model.home_directory = where;
  setup.model.turn_bytes = 65536;
}

// The groups of optimizer_memory.h, and one whose planes are several segments on every rank.
Scenario scenario(const Form &form, const Layout &layout, Homes homes) {
  Scenario setup = scenario_by(form, layout);
  setup.groups.push_back({"large",
                          {{"matrix", {151, 300}, FSDP_BFLOAT16},
                           {"vector", {9'011}, FSDP_BFLOAT16, FSDP_PARAM_NO_DECAY},
                           {"odd", {31, 259}, FSDP_BFLOAT16}}});
  take_home(setup, homes);
  return setup;
}

// FSDP_MAIN_NONE has no main weights that could be at home.
Homes homes_of(const Form &form, size_t number) {
  return form.storage == FSDP_MAIN_NONE ? Homes::state : std::array{Homes::both, Homes::state, Homes::main}[number % 3];
}

constexpr Form all_forms[] = {fp32, forms[0], forms[1], forms[2], forms[3], forms[4]};

// All layouts with the forms of most and of fewest bytes, and every third layout with the other forms.
std::vector<std::tuple<Form, Layout>> combinations() {
  std::vector<std::tuple<Form, Layout>> all;
  Sample sample(5);
  for (const Form &form : all_forms)
    for (const Layout &layout : layouts)
      if ((&form == &all_forms[0] || &form == &all_forms[3] || (&layout - layouts) % 3 == (&form - all_forms) % 3) &&
          sample.takes_next())
        all.emplace_back(form, layout);
  return all;
}

class Home : public testing::TestWithParam<std::tuple<Form, Layout>> {};
INSTANTIATE_TEST_SUITE_P(All, Home, testing::ValuesIn(combinations()), [](const auto &info) {
  return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name;
});

TEST_P(Home, HasTheReferencesBits) {
  const auto &[form, layout] = GetParam();
  static size_t number = 0;
  const Scenario setup = scenario(form, layout, homes_of(form, number++));
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

class HomeForms : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(All, HomeForms, testing::ValuesIn(all_forms),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(HomeForms, ProcessesHaveTheReferencesBits) {
  const Scenario setup = scenario(GetParam(), layouts[5], homes_of(GetParam(), 0));
  EXPECT_EQ(difference(setup, train_processes(setup)), "");
}

// With two turns nothing is read ahead, and with sixteen most segments are.
TEST_P(HomeForms, TheNumberOfTurnsChangesNoBit) {
  for (const uint32_t turns : {2u, 16u}) {
    Scenario setup = scenario(GetParam(), layouts[6], homes_of(GetParam(), 0));
    setup.model.turns = turns;
    EXPECT_EQ(difference(setup, train_threads(setup)), "") << turns;
  }
}

// On a GPU the planes are in memory of the host, which its kernels use in place.
TEST(HomeOnTheHost, HasTheReferencesBits) {
  Sample sample(on_gpu() ? 1 : 5);
  for (const Form &form : all_forms)
    for (const Layout &layout : {layouts[2], layouts[6], layouts[8], layouts[9]}) {
      if (!sample.takes_next()) continue;
      Scenario setup = scenario_by(form, layout);
      setup.model.state_home = FSDP_HOME_HOST;
      if (form.storage != FSDP_MAIN_NONE) setup.model.main_home = FSDP_HOME_HOST;
      const auto outcomes = train_threads(setup);
      EXPECT_EQ(difference(setup, outcomes), "") << form.name << " " << layout.name;
      EXPECT_EQ(outcomes[0].stats.allocated_bytes[FSDP_ROLE_HOME] > 0, on_gpu()) << form.name << " " << layout.name;
    }
}

// Experts: two meshes with other parameters, whose planes are in one file of each rank.
TEST(HomeMeshes, HaveTheBitsOfMemory) {
  for (const Form &form : {fp32, forms[2]}) {
    Scenario setup = scenario_by(form, layouts[5]);
    setup.ranks = 4;
    setup.groups = {{"shared", {{"w", {129, 48}, FSDP_BFLOAT16}}}, {"experts", {{"e", {97, 300}, FSDP_BFLOAT16}}}};
    setup.groups[1].meshes = 2;
    const std::vector<Outcome> in_memory = train_threads(setup);
    take_home(setup, Homes::both);
    const std::vector<Outcome> in_file = train_threads(setup);
    for (uint32_t rank = 0; rank < setup.ranks; ++rank) {
      EXPECT_EQ(in_file[rank].error + in_memory[rank].error, "");
      EXPECT_FALSE(in_file[rank].weights.empty());
      EXPECT_TRUE(same_bits(in_file[rank].weights, in_memory[rank].weights)) << form.name << " on rank " << rank;
    }
  }
}

// A step reads and writes each plane of the parameters that it updates once; publishing reads main weights.
TEST(HomeBytes, EachPlaneIsReadAndWrittenOnceAStep) {
  constexpr uint64_t count = 100'000;
  Scenario setup = one_parameter("w", count, fp32, 0);
  setup.ranks = 1;
  take_home(setup, Homes::both);
  run(setup, "bytes", [](Rank &rank) {
    rank.load();
    const Stats before = rank.stats();
    clean_step(rank, 0);
    const Stats after = rank.stats();
    constexpr uint64_t planes = 3 * ((count * 4 + 4095) / 4096 * 4096);
    EXPECT_EQ(after.home_read_bytes - before.home_read_bytes, planes);
    EXPECT_EQ(after.home_written_bytes - before.home_written_bytes, planes);
    const Memory memory = memory_of(rank.model, 0);
    EXPECT_EQ(memory.role_bytes[FSDP_ROLE_HOME], planes);
    EXPECT_EQ(memory.role_bytes[FSDP_ROLE_MAIN] + memory.role_bytes[FSDP_ROLE_OPTIMIZER], 0u);
  });
}

// Parameters of odd sizes, so that segments begin and end anywhere in them, and have parts of two of them.
TEST(HomeSegments, BeginAnywhereInParameters) {
  Sample sample(5);
  for (const Form &form : {forms[0], forms[2], forms[4], fp32, forms[1]})
    for (const uint32_t ranks : {1u, 3u})
      for (const Homes homes : {Homes::both, Homes::state}) {
        if ((form.storage == FSDP_MAIN_NONE && homes != Homes::state) || !sample.takes_next()) continue;
        Scenario setup = scenario_by(form, layouts[ranks == 1 ? 0 : 5]);
        setup.groups = {{"odd",
                         {{"a", {4099}, FSDP_BFLOAT16},
                          {"b", {30'001}, FSDP_BFLOAT16, FSDP_PARAM_NO_DECAY},
                          {"c", {40'003}, FSDP_BFLOAT16},
                          {"d", {20'021}, FSDP_BFLOAT16}}}};
        setup.steps = 2;
        take_home(setup, homes);
        EXPECT_EQ(difference(setup, train_threads(setup)), "") << form.name << " on " << ranks;
      }
}

TEST(HomeBytes, SegmentsOfUntrainedParametersAreNotWritten) {
  Scenario setup = one_parameter("w", 100'000, fp32, 0);
  setup.groups[0].params.push_back({"x", {100'000}, FSDP_BFLOAT16});
  setup.ranks = 1;
  for (const Homes homes : {Homes::both, Homes::state}) {
    take_home(setup, homes);
    run(setup, "bytes", [&](Rank &rank) {
      rank.load();
      FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
      const Stats before = rank.stats();
      FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
      const Stats after = rank.stats();
      // One segment has elements of both.
      const uint64_t planes = homes == Homes::both ? 3 : 2, segment = 65536;
      EXPECT_LE(after.home_written_bytes - before.home_written_bytes, planes * 4 * 100'000 + 2 * segment);
      EXPECT_GE(after.home_written_bytes - before.home_written_bytes, planes * 4 * 100'000);
      // Weights that stay as they are may have been loaded, so main weights are read; states are not.
      const uint64_t read = after.home_read_bytes - before.home_read_bytes;
      EXPECT_EQ(read > (planes * 4 * 100'000 + 2 * segment), homes == Homes::both);
    });
    setup.model.main_home = setup.model.state_home = 0;
  }
}

// ---- steps that leave parameters as they are ----

// Weights and states of the model and of the same model in memory, after each of `body`'s calls of `look`.
using Look = std::function<void(Rank &)>;
void compare(Scenario setup, const std::function<void(Rank &, const Look &)> &body) {
  std::vector<std::vector<float>> found[2];
  for (const bool in_file : {false, true}) {
    if (!in_file) setup.model.main_home = setup.model.state_home = 0;
    Scenario own = setup;
    if (in_file) take_home(own, homes_of({"", setup.model.main_storage, 0}, 0));
    run(own, in_file ? "file" : "memory", [&](Rank &rank) {
      body(rank, [&](Rank &of) {
        const auto all = everything(of);
        if (of.rank == 0) found[in_file].insert(found[in_file].end(), all.begin(), all.end());
      });
    });
  }
  EXPECT_FALSE(found[0].empty());
  EXPECT_TRUE(same_bits(found[0], found[1]));
}

Scenario two_parameters(const Form &form) {
  Scenario setup = one_parameter("w", 60'000, form, seed);
  setup.groups[0].params.push_back({"x", {60'000}, FSDP_BFLOAT16});
  return setup;
}

TEST_P(HomeForms, UntrainedParametersStayAsInMemory) {
  compare(two_parameters(GetParam()), [](Rank &rank, const Look &look) {
    rank.load();
    const std::vector<float> values(60'000, 0.25F);
    const Placed placed(values);
    const auto step = [&](bool both) {
      const fsdp_grad grads[] = {{both ? placed.data() : nullptr, both ? 60'000u : 0u, FSDP_FLOAT32, 0},
                                 {placed.data(), 60'000, FSDP_FLOAT32, 0}};
      FSDP(fsdp_apply_grads(rank.model, grads, 2, sizeof *grads, 0.01, 0, nullptr, stream(), nullptr));
      look(rank);
    };
    step(true);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    step(false);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 1));
    FSDP(fsdp_set_param_lr_scale(rank.groups[0], 1, 0.5));
    step(true);
  });
}

std::vector<float> shown(Rank &rank, size_t param) {
  FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, stream()));
  const std::vector<float> values = rank.view(0, param, FSDP_EVAL);
  FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, stream()));
  return values;
}

// A step also publishes weights that it does not update, because they may have been loaded in the window.
TEST_P(HomeForms, WeightsLoadedInAWindowArePublishedAsInMemory) {
  compare(two_parameters(GetParam()), [](Rank &rank, const Look &look) {
    rank.load();
    clean_step(rank, 0);
    std::vector<float> values(60'000);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 128) / 64.0F;
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));  // with gradients of zeros
    FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
    look(rank);
    REQUIRE(same_bits({shown(rank, 0)}, {values}));
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(fsdp_load_param(rank.groups[0], 1, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    look(rank);
    REQUIRE(same_bits({shown(rank, 1)}, {values}));
  });
}

// Calls read and write the file through a buffer of 1 MiB. The second parameter begins inside a page.
TEST(HomeCalls, ReadAndWriteMoreThanTheirBufferHolds) {
  for (const Form &form : {fp32, forms[1]}) {
    Scenario setup = one_parameter("w", 300'001, form, seed);
    setup.groups[0].params.push_back({"x", {800'003}, FSDP_BFLOAT16});
    setup.ranks = 1;
    compare(setup, [](Rank &rank, const Look &look) {
      rank.load();
      look(rank);
      std::vector<float> values(800'003);
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 9973) / 8192.0F;
      finish_step(rank, 0);
      FSDP(fsdp_load_state(rank.groups[0], 1, "exp_avg", values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK,
                           0));
      FSDP(fsdp_load_param(rank.groups[0], 1, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
      look(rank);
      update(rank);
      look(rank);
    });
  }
}

TEST_P(HomeForms, ADiscardedStepChangesNothing) {
  run(scenario(GetParam(), layouts[5], homes_of(GetParam(), 0)), "discarded", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const auto before = everything(rank);
    finish_step(rank, 1);
    FSDP(fsdp_discard_step(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), before));
    FSDP(fsdp_check_replicas(rank.model, 0, stream()));
  });
}

TEST_P(HomeForms, NormsOfWeightsAreThoseInMemory) {
  for (const Layout &layout : {layouts[1], layouts[5], layouts[9]}) {
    std::vector<double> norms[2];
    for (const bool in_file : {false, true}) {
      Scenario setup = scenario(GetParam(), layout, homes_of(GetParam(), 0));
      if (!in_file) setup.model.main_home = setup.model.state_home = 0;
      run(setup, "norms", [&](Rank &rank) {
        rank.load();
        clean_step(rank, 0);
        std::vector<double> own(11);
        FSDP(fsdp_get_param_weight_norms(rank.model, stream(), own.data(), own.size()));
        if (rank.rank == 1) norms[in_file] = own;
      });
    }
    EXPECT_EQ(norms[0], norms[1]) << layout.name;
  }
}

// ---- checkpoints ----

class HomeCheckpoint : public Checkpoint, public testing::WithParamInterface<Form> {};
INSTANTIATE_TEST_SUITE_P(All, HomeCheckpoint, testing::ValuesIn(all_forms),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(HomeCheckpoint, GoesOnInMemoryAndInAFileAlike) {
  std::vector<std::vector<float>> straight;
  const auto keep = [](Rank &rank, std::vector<std::vector<float>> &to) {
    const auto all = everything(rank);
    if (rank.rank == 0) to = all;
  };
  run(scenario(GetParam(), layouts[9], homes_of(GetParam(), 0)), "straight", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    for (uint32_t step = 2; step < 4; ++step) clean_step(rank, step);
    keep(rank, straight);
  });
  for (const bool in_file : {false, true}) {
    std::vector<std::vector<float>> resumed;
    Scenario setup = scenario(GetParam(), layouts[9], homes_of(GetParam(), 0));
    if (!in_file) setup.model.main_home = setup.model.state_home = 0;
    run(setup, "resumed", [&](Rank &rank) {
      FSDP(load(rank, path));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      for (uint32_t step = 2; step < 4; ++step) clean_step(rank, step);
      keep(rank, resumed);
    });
    EXPECT_TRUE(same_bits(straight, resumed)) << in_file;
  }
}

// The save reads the file while the caller trains on, up to the next update.
TEST_P(HomeCheckpoint, ASaveInTheBackgroundHasTheBitsOfItsStep) {
  const Scenario setup = scenario(GetParam(), layouts[6], homes_of(GetParam(), 0));
  std::vector<std::vector<float>> saved, loaded;
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const auto all = everything(rank);
    fsdp_checkpoint *checkpoint = nullptr;
    FSDP(fsdp_begin_checkpoint(rank.context, path.c_str(), nullptr, &checkpoint));
    FSDP(fsdp_add_checkpoint_model(checkpoint, nullptr, rank.model));
    FSDP(fsdp_commit_checkpoint(checkpoint));
    clean_step(rank, 1);
    FSDP(fsdp_wait_checkpoint(checkpoint));
    fsdp_destroy_checkpoint(checkpoint);
    if (rank.rank == 0) saved = all;
  });
  run(setup, "loaded", [&](Rank &rank) {
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    const auto all = everything(rank);
    if (rank.rank == 0) loaded = all;
  });
  EXPECT_TRUE(same_bits(saved, loaded));
}

// ---- what is left, and what is refused ----

class HomeFolder : public Checkpoint {};

TEST_F(HomeFolder, NoNameIsInTheDirectoryAtAnyTime) {
  Scenario setup = scenario(fp32, layouts[5], Homes::both);
  setup.model.home_directory = path.c_str();
  run(setup, "names", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    EXPECT_TRUE(names().empty());
  });
  EXPECT_TRUE(names().empty());
}

TEST_F(HomeFolder, NothingIsLeftOfAProcessThatIsKilled) {
  const pid_t child = ::fork();
  if (child == 0) {
    Scenario setup = scenario(fp32, layouts[0], Homes::both);
    setup.model.home_directory = path.c_str();
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      ::raise(SIGKILL);
    });
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(names().empty());
}

// Creates a model of one group with these parameters, and returns the status of the seal.
fsdp_status seal_with(fsdp_context *context, const fsdp_model_options &options, const std::vector<ParamDef> &params) {
  fsdp_model *model = nullptr;
  fsdp_status status = fsdp_create_model(context, &options, &model);
  if (status != FSDP_OK) return status;
  std::vector<fsdp_param> declared;
  for (const ParamDef &def : params) {
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = def.name.c_str();
    param.shape = def.shape.data(), param.dimension_count = static_cast<uint32_t>(def.shape.size());
    param.dtype = def.dtype, param.quantization = def.quantization;
    declared.push_back(param);
  }
  fsdp_group *group = nullptr;
  status = fsdp_create_group(model, "g", declared.data(), declared.size(), sizeof(fsdp_param), nullptr, &group);
  if (status == FSDP_OK) status = fsdp_seal_model(model);
  fsdp_destroy_model(model);
  return status;
}

TEST(HomeMisuse, IsRefusedWithItsReason) {
  Scenario setup = one_parameter("w", 5000, fp32, 0);
  setup.ranks = 1;
  run_threads(setup, [](uint32_t, fsdp_context *context) {
    const std::vector<ParamDef> bf16 = {{"w", {64, 64}, FSDP_BFLOAT16}}, single = {{"w", {64, 64}}};
    const auto options = [](fsdp_home state, fsdp_home main, const char *where) {
      fsdp_model_options of = FSDP_MODEL_OPTIONS_INIT;
      of.state_home = state, of.main_home = main, of.home_directory = where;
      return of;
    };
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, options(FSDP_HOME_FILE, 0, nullptr), bf16),
                 "fsdp_create_model: home_directory is NULL", "FSDP_HOME_FILE needs the directory");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, options(0, FSDP_HOME_FILE, ""), bf16),
                 "home_directory is empty");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, options(4, 0, directory), bf16), "state_home");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, options(0, -1, directory), bf16), "main_home");
    fsdp_model_options small = options(FSDP_HOME_FILE, 0, directory);
    small.turn_bytes = 65535;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, small, bf16), "turn_bytes is 65535", "at least 65536");
    for (const uint32_t turns : {1u, 17u}) {
      fsdp_model_options few = options(FSDP_HOME_FILE, 0, directory);
      few.turns = turns;
      EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, few, bf16), "turns is " + std::to_string(turns),
                   "[2, 16]");
    }
    fsdp_model_options grads = options(0, 0, directory);
    grads.grad_home = 4;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, grads, bf16), "grad_home");
    grads.grad_home = FSDP_HOME_FILE;
    EXPECT_WORKS(seal_with(context, grads, single));
    grads.strategy = FSDP_STRATEGY_NO_SHARD;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, grads, single),
                 "fsdp_seal_model: grad_home is FSDP_HOME_FILE",
                 "no parameter has main grads with memory of their own");
    grads.strategy = FSDP_STRATEGY_OPTIM;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, grads, single), "FSDP_REDUCE_POLICY_LAST");
    EXPECT_WORKS(seal_with(context, grads, bf16));
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, options(0, FSDP_HOME_FILE, directory), single),
                 "fsdp_seal_model: main_home is FSDP_HOME_FILE", "no parameter has main weights apart");
    fsdp_model_options none = options(0, FSDP_HOME_FILE, directory);
    none.main_storage = FSDP_MAIN_NONE;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, none, bf16), "no parameter has main weights apart");
    fsdp_model_options own = options(FSDP_HOME_FILE, 0, directory);
    own.optimizer = FSDP_OPTIMIZER_CALLER;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, seal_with(context, own, bf16), "state_home is FSDP_HOME_FILE",
                 "no parameter has an optimizer state");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
                 seal_with(context, options(0, FSDP_HOME_FILE, directory),
                           {quantized({"q", {64, 64}, FSDP_BFLOAT16}, FSDP_QUANTIZE_MXFP8)}),
                 "parameter 'q' of group 'g' is quantized", "main_home");
    EXPECT_FAILS(FSDP_SYSTEM, seal_with(context, options(FSDP_HOME_FILE, 0, "/var/tmp/there-is-none"), bf16),
                 "the file of home_directory '/var/tmp/there-is-none': opening the directory",
                 "No such file or directory");
    // On the host device the host's memory is the device's, and needs no directory.
    EXPECT_WORKS(seal_with(context, options(FSDP_HOME_HOST, FSDP_HOME_HOST, nullptr), bf16));
    EXPECT_WORKS(seal_with(context, options(FSDP_HOME_FILE, FSDP_HOME_FILE, directory), bf16));
  });
}

TEST(HomeMisuse, RanksWithOtherHomesDifferAtTheSeal) {
  Scenario setup = one_parameter("w", 5000, fp32, 0);
  run_threads(setup, [&](uint32_t rank, fsdp_context *context) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.state_home = rank ? FSDP_HOME_FILE : 0;
    options.home_directory = directory;
    EXPECT_FAILS(FSDP_MISMATCH, seal_with(context, options, {{"w", {64, 64}, FSDP_BFLOAT16}}), "state home 1",
                 "state home 3");
  });
}

// Each rank writes its own values into the planes in its file, as a replica that has drifted would have them.
TEST(HomeReplicas, DriftInTheFileIsFound) {
  for (const bool drifts : {false, true}) {
    Scenario setup = one_parameter("w", 5120, fp32, 0);
    setup.model.strategy = FSDP_STRATEGY_NO_SHARD;
    take_home(setup, Homes::both);
    std::vector<std::string> errors;
    run_threads(
        setup,
        [&](uint32_t r, fsdp_context *context) {
          const Rank rank(context, setup);
          const std::vector<float> values(5120, drifts && r == 1 ? 0.25F : 0.5F);
          FSDP(fsdp_load_state(rank.groups[0], 0, "exp_avg", values.data(), FSDP_FLOAT32, 5120, FSDP_EVERY_RANK, 0));
          FSDP(fsdp_publish_weights(rank.model, stream()));
          FSDP(fsdp_check_replicas(rank.model, 0, stream()));
        },
        &errors);
    EXPECT_EQ(errors.at(0).find("optimizer state 'exp_avg'") != std::string::npos, drifts) << errors.at(0);
  }
}

// A directory in memory is used, with a warning that says how much of it.
TEST(HomeLog, AFileInMemoryIsWarnedOf) {
  std::string told;
  Scenario setup = one_parameter("w", 100'000, fp32, 0);
  setup.ranks = 1;
  setup.context.log_level = FSDP_LOG_WARNING;
  setup.context.log_data = &told;
  setup.context.log = [](void *data, fsdp_log_level, const char *line) { *static_cast<std::string *>(data) += line; };
  take_home(setup, Homes::both);
  run(setup, "disk", [](Rank &rank) { rank.load(); });
  EXPECT_EQ(told.find("is in memory"), std::string::npos) << told;
  take_home(setup, Homes::both, "/dev/shm");
  run(setup, "memory", [](Rank &rank) { rank.load(); });
  EXPECT_NE(told.find("the file of home_directory '/dev/shm' is in memory (tmpfs), and takes 1204224 bytes"),
            std::string::npos)
      << told;
}

TEST(HomeMisuse, AddressesInTheFileAreNotHandedOut) {
  for (const Form &form : {fp32, forms[2]})
    run(scenario(form, layouts[6], Homes::both), "addresses", [&](Rank &rank) {
      rank.load();
      const auto shards = rank.shards();
      size_t in_file = 0;
      for (size_t s = 0; s < shards.size(); ++s) {
        fsdp_tensor state = FSDP_TENSOR_INIT;
        FSDP(fsdp_get_shard_state(rank.model, s, "exp_avg", &state));
        EXPECT_EQ(state.data, nullptr) << shards[s].name;
        in_file += shards[s].main_weight == nullptr;
        if (state.dtype != FSDP_UINT8) continue;
        FSDP(fsdp_get_shard_state(rank.model, s, "exp_avg.absmax", &state));
        EXPECT_NE(state.data, nullptr) << shards[s].name;
      }
      EXPECT_GT(in_file, 0u);
    });
}

}  // namespace
}  // namespace home_test
