// SPDX-License-Identifier: Apache-2.0
// FSDP_DEBUG_VIEWS: in debug mode the process's file says for every rank and model what each address range holds, for
// every strategy and way of gathering. tests/tools/fault_test.sh tests what a handler prints from it.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "harness.h"

using namespace harness;

namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

struct Range {
  uintptr_t begin = 0, end = 0;
  std::string kind, group;
  uint32_t rank = 0, model = 0;
  bool holds(const void *data, uint64_t bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(data);
    return begin <= first && first + bytes <= end;
  }
};

class DebugViews : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(folder_);
    ::setenv("FSDP_DEBUG_VIEWS", folder_.c_str(), 1);
  }
  void TearDown() override {
    ::unsetenv("FSDP_DEBUG_VIEWS");
    fs::remove_all(folder_);
  }
  std::vector<Range> ranges() const {
    std::vector<Range> all;
    std::ifstream lines(file_);
    for (std::string text; std::getline(lines, text);) {
      std::istringstream line(text);
      Range &range = all.emplace_back();
      line >> std::hex >> range.begin >> range.end >> std::dec >> range.kind >> range.rank >> range.model;
      std::getline(line >> std::ws, range.group);
    }
    return all;
  }
  // What the last range says that holds all of this: "KIND of GROUP of rank R, model M"; empty if none does.
  std::string find(const void *data, uint64_t bytes) const {
    std::string found;
    for (const Range &range : ranges())
      if (range.holds(data, bytes))
        found = range.kind + " of " + range.group + " of rank " + std::to_string(range.rank) + ", model " +
                std::to_string(range.model);
    return found;
  }
  // Describes the range of a view that the library lent.
  std::string find(const fsdp_tensor &tensor) const {
    return find(tensor.data, tensor.element_count * fsdp_get_dtype_size(tensor.dtype));
  }

  const fs::path folder_ = testing::TempDir() + "debug_views_test." + std::to_string(::getpid());
  const fs::path file_ = folder_ / ("views-" + std::to_string(::getpid()) + ".txt");
};

fsdp_tensor view_of(fsdp_group *group, uint64_t param, fsdp_phase phase) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  FSDP(fsdp_unshard(group, phase, 0, nullptr));
  FSDP(fsdp_get_param(group, param, phase, &view));
  FSDP(fsdp_reshard(group, phase, 0, nullptr));
  return view;
}

fsdp_tensor gradient_of(fsdp_group *group, uint64_t param) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(group, param, 0, nullptr, &grad, &accumulate));
  return grad;
}

#if defined(__SANITIZE_THREAD__)
// Under ThreadSanitizer ranks share one view of the memory, and the first rank's range would be found.
constexpr uint32_t max_ranks = 1;
#else
constexpr uint32_t max_ranks = 2;
#endif

TEST_F(DebugViews, NameTheGroupOfEveryViewAndGradient) {
  for (const fsdp_schedule_kind schedule : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED})
    for (const fsdp_strategy strategy :
         {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
      for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
        for (uint32_t ranks = 1; ranks <= max_ranks; ++ranks) {
          Scenario setup = debug_scenario(strategy, ranks, mode);
          setup.schedule = schedule;
          if (schedule == FSDP_SCHEDULE_SEQUENTIAL) setup.model.view_kind = FSDP_VIEWS_PRIVATE;
          SCOPED_TRACE("schedule " + std::to_string(schedule) + ", strategy " + std::to_string(strategy) + ", mode " +
                       std::to_string(mode) + ", ranks " + std::to_string(ranks));
          const bool gathers = strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
          const std::string kind = !gathers ? "whole-weights" : mode == FSDP_UNSHARD_COPIED ? "gathered" : "weights";
          run_threads(setup, [&](uint32_t r, fsdp_context *context) {
            Rank rank(context, setup);
            rank.load();
            for (size_t g = 0; g < rank.groups.size(); ++g) {
              const std::string place = " of " + rank.def(g).name + " of rank " + std::to_string(r) + ", model 0";
              for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
                for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD})
                  EXPECT_EQ(find(view_of(rank.groups[g], p, phase)), kind + place);
                if (rank.def(g).params[p].flags & FSDP_PARAM_FROZEN) continue;
                EXPECT_EQ(find(gradient_of(rank.groups[g], p)), "gradient" + place);
              }
              FSDP(fsdp_discard_step(rank.model, nullptr));
            }
            FSDP(fsdp_close_context(context));
          });
          fs::remove(file_);
        }
}

TEST_F(DebugViews, AreOfTheLatestModelAndEndWithTheirs) {
  const Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, FSDP_UNSHARD_MAPPED);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    fsdp_tensor view;
    const std::string name = setup.groups[0].name;
    {
      const Rank before(context, setup);
      Rank rank(context, setup);
      rank.load();
      view = view_of(rank.groups[0], 0, FSDP_EVAL);
      EXPECT_EQ(find(view), "weights of " + name + " of rank 0, model 1");
    }
    EXPECT_EQ(find(view), "destroyed of " + name + " of rank 0, model 1");
    FSDP(fsdp_close_context(context));
  });
  struct stat status {};
  ASSERT_EQ(::stat(file_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
}

TEST_F(DebugViews, AGroupIsOneLineWhateverItsName) {
  Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, FSDP_UNSHARD_MAPPED);
  setup.groups = equal_groups(1, 8, 8);
  setup.groups[0].name = "a \n\x1b[2J name \xC3\xA9";
  run_threads(setup, [&](uint32_t, fsdp_context *context) { const Rank rank(context, setup); });
  ASSERT_FALSE(ranges().empty());
  for (const Range &range : ranges()) EXPECT_EQ(range.group, "a ??[2J name \xC3\xA9");
}

TEST_F(DebugViews, AreWrittenInDebugModeOnlyAndNotOfPlans) {
  Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, FSDP_UNSHARD_MAPPED);
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(1, 0, &setup.context, &context));
  { const Rank rank(context, setup); }
  fsdp_destroy_context(context);
  setup.context.flags = 0;
  run_threads(setup, [&](uint32_t, fsdp_context *own) { const Rank rank(own, setup); });
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(DebugViews, OnesThatCannotBeWrittenAreAWarning) {
  Lines lines;
  Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, FSDP_UNSHARD_MAPPED);
  setup.context.log = [](void *kept, fsdp_log_level, const char *message) {
    static_cast<Lines *>(kept)->push_back(message);
  };
  setup.context.log_data = &lines;
  const std::string nowhere = folder_ / "nowhere";
  ::setenv("FSDP_DEBUG_VIEWS", nowhere.c_str(), 1);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_close_context(context));
  });
  ASSERT_GE(lines.size(), 2u);  // at the start, when there is time to do something, and at the seal
  for (const std::string &line : lines)
    for (const std::string &word : {std::string("rank 0"), nowhere, std::string("No such file or directory")})
      EXPECT_NE(line.find(word), std::string::npos) << line;
}

}  // namespace
