// SPDX-License-Identifier: Apache-2.0
// The caller's own spans, a full ring, and the file: when it is written, by which thread, and how writing fails.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <thread>

#include "harness.h"
#include "trace_file.h"

using namespace harness;

namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

// A folder of its own, gone at the end.
class TraceFolder : public testing::Test {
 protected:
  void SetUp() override { fs::create_directory(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string &name) const { return (folder_ / name).string(); }
  size_t file_count() const { return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {})); }

  const fs::path folder_ = testing::TempDir() + "trace_file_test." + std::to_string(::getpid());
};
using CallerSpans = TraceFolder;
using TraceRing = TraceFolder;
using TraceWriting = TraceFolder;

// A context of a world of one.
class Solo {
 public:
  explicit Solo(uint32_t flags = FSDP_CONTEXT_TRACE, uint64_t events = 0) {
    fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
    options.flags = flags;
    options.trace_events = events;
    FSDP(fsdp_create_local_contexts(1, &options, &context));
  }
  ~Solo() { fsdp_destroy_context(context); }
  Solo(const Solo &) = delete;
  Solo &operator=(const Solo &) = delete;
  void span(const char *name) const {
    FSDP(fsdp_begin_span(context, name));
    FSDP(fsdp_end_span(context));
  }

  fsdp_context *context = nullptr;
};

TEST_F(CallerSpans, SpansOfTheCallerNest) {
  const Solo solo;
  FSDP(fsdp_begin_span(solo.context, "step"));
  solo.span("forward");
  FSDP(fsdp_begin_span(solo.context, "backward"));
  solo.span("forward");
  FSDP(fsdp_end_span(solo.context));
  FSDP(fsdp_end_span(solo.context));
  FSDP(fsdp_begin_span(solo.context, "never ended"));
  FSDP(fsdp_write_trace(solo.context, path("trace").c_str()));
  const TraceFile trace(path("trace"));
  const auto spans = trace.of_category(0, "caller", "user");
  EXPECT_EQ(TraceFile::names(spans), (Names{"step", "forward", "backward", "forward"}));
  EXPECT_LE(spans[3].end_ns, spans[2].end_ns);
  EXPECT_LE(spans[2].end_ns, spans[0].end_ns);
  EXPECT_GE(spans[2].begin_ns, spans[1].end_ns);
}

TEST_F(CallerSpans, TheNameIsCopied) {
  const Solo solo;
  std::string name = "first";
  solo.span(name.c_str());
  name = "other";
  solo.span(name.c_str());
  FSDP(fsdp_write_trace(solo.context, path("trace").c_str()));
  EXPECT_EQ(TraceFile::names(TraceFile(path("trace")).of_category(0, "caller", "user")), (Names{"first", "other"}));
}

TEST_F(CallerSpans, TooManyOpenSpansOrNamesAreRefused) {
  const Solo solo;
  require_error(fsdp_end_span(solo.context), FSDP_INVALID_STATE,
                {"fsdp_end_span", "no span is open", "fsdp_begin_span"});
  for (int i = 0; i < 64; ++i) FSDP(fsdp_begin_span(solo.context, "deep"));
  require_error(fsdp_begin_span(solo.context, "deeper"), FSDP_INVALID_STATE,
                {"64 spans are open", "'deeper'", "fsdp_end_span"});
  for (int i = 0; i < 64; ++i) FSDP(fsdp_end_span(solo.context));
  for (int i = 2; i < 256; ++i) solo.span(("name " + std::to_string(i)).c_str());
  require_error(fsdp_begin_span(solo.context, "one more"), FSDP_INVALID_ARGUMENT,
                {"'one more'", "name 257", "at most 256"});
  solo.span("deep");
}

TEST_F(CallerSpans, NamesAreChecked) {
  const Solo solo;
  require_error(fsdp_begin_span(solo.context, nullptr), FSDP_INVALID_ARGUMENT, {"fsdp_begin_span: name is NULL"});
  require_error(fsdp_begin_span(solo.context, ""), FSDP_INVALID_ARGUMENT, {"name is empty"});
  require_error(fsdp_begin_span(solo.context, "\xff"), FSDP_INVALID_ARGUMENT, {"UTF-8"});
  require_error(fsdp_begin_span(solo.context, std::string(256, 'x').c_str()), FSDP_INVALID_ARGUMENT, {"255"});
}

TEST_F(TraceWriting, WithoutTheFlagThereIsNothingToWrite) {
  const Solo solo(0);
  FSDP(fsdp_begin_span(solo.context, "forward"));
  FSDP(fsdp_end_span(solo.context));
  FSDP(fsdp_end_span(solo.context));  // nothing is kept, so nothing can be missing
  require_error(fsdp_write_trace(solo.context, path("trace").c_str()), FSDP_INVALID_STATE,
                {"fsdp_write_trace", "FSDP_CONTEXT_TRACE"});
  EXPECT_EQ(file_count(), 0u);
}

TEST_F(TraceWriting, APlanningContextHasNoTrace) {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.flags = FSDP_CONTEXT_TRACE;
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(2, 0, &options, &context));
  require_error(fsdp_write_trace(context, path("trace").c_str()), FSDP_INVALID_STATE, {"only plans"});
  fsdp_destroy_context(context);
}

TEST_F(TraceWriting, AProcessOfAJobKeepsOneToo) {
  Scenario setup;
  setup.ranks = 1;
  setup.context.flags = FSDP_CONTEXT_TRACE;
  fsdp_context *context = join(setup, 0, "trace-" + std::to_string(::getpid()));
  FSDP(fsdp_write_trace(context, path("trace").c_str()));
  EXPECT_GT(fs::file_size(path("trace")), 0u);
  fsdp_destroy_context(context);
}

TEST_F(TraceWriting, AnExistingFileIsReplacedWhole) {
  const Solo solo;
  std::ofstream(path("trace")) << std::string(100'000, 'x');
  FSDP(fsdp_write_trace(solo.context, path("trace").c_str()));
  const TraceFile trace(path("trace"));
  EXPECT_EQ(trace.timelines.at(0).at("events"), 0);
  EXPECT_EQ(file_count(), 1u);
}

TEST_F(TraceWriting, FailuresNameThePathAndTheCause) {
  const Solo solo;
  require_error(fsdp_write_trace(solo.context, nullptr), FSDP_INVALID_ARGUMENT, {"path is NULL"});
  require_error(fsdp_write_trace(solo.context, ""), FSDP_INVALID_ARGUMENT, {"path is empty"});
  require_error(fsdp_write_trace(solo.context, path("no/trace").c_str()), FSDP_SYSTEM,
                {path("no/trace"), "No such file or directory"});
  fsdp_error error = FSDP_ERROR_INIT;
  FSDP(fsdp_get_last_error(nullptr, &error));
  EXPECT_EQ(error.origin, FSDP_ORIGIN_OS);
  EXPECT_EQ(error.origin_code, ENOENT);
  fsdp_error of_context = FSDP_ERROR_INIT;
  FSDP(fsdp_get_last_error(solo.context, &of_context));
  EXPECT_STREQ(of_context.message, error.message);
  EXPECT_EQ(of_context.context_failed, 0);
  fs::create_directory(path("folder"));
  require_error(fsdp_write_trace(solo.context, path("folder").c_str()), FSDP_SYSTEM,
                {path("folder"), "Is a directory"});
  EXPECT_EQ(file_count(), 1u);  // what was written beside it is gone
}

TEST_F(TraceWriting, AFailedContextStillTellsItsStory) {
  const Solo solo;
  solo.span("before");
  FSDP(fsdp_abort_context(solo.context, "test"));
  FSDP(fsdp_write_trace(solo.context, path("trace").c_str()));
  EXPECT_EQ(TraceFile(path("trace")).of_category(0, "caller", "user").size(), 1u);
}

TEST_F(TraceRing, KeepsTheLastEventsAndCountsTheOthers) {
  const Solo solo(FSDP_CONTEXT_TRACE, 16);
  for (int i = 0; i < 100; ++i) solo.span(("span " + std::to_string(i)).c_str());
  FSDP(fsdp_write_trace(solo.context, path("trace").c_str()));
  const TraceFile trace(path("trace"));
  const auto spans = trace.lane(0, "caller");
  ASSERT_EQ(spans.size(), 16u);
  EXPECT_EQ(spans.front().name, "span 84");
  EXPECT_EQ(spans.back().name, "span 99");
  EXPECT_EQ(trace.timelines.at(0).at("lost"), 84);
  EXPECT_EQ(trace.timelines.at(0).at("events"), 16);
  EXPECT_EQ(trace.labels.at(0), "84 events lost");
}

TEST_F(TraceRing, HasALargestSize) {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.flags = FSDP_CONTEXT_TRACE;
  options.trace_events = (1u << 24) + 1;
  fsdp_context *context = nullptr;
  require_error(fsdp_create_local_contexts(1, &options, &context), FSDP_INVALID_ARGUMENT, {"trace_events is 16777217"});
}

// The ring is small enough that writers overtake the reader, and each other.
TEST_F(TraceRing, IsReadWhileStreamsWrite) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  scenario.context.flags = FSDP_CONTEXT_TRACE;
  scenario.context.trace_events = 32;
  scenario.groups = equal_groups(3, 16, 8);
  std::atomic<int> written = 0;
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    std::atomic<bool> stop = false;
    std::string problem;
    std::thread reader([&] {
      const std::string file = path("rank" + std::to_string(r));
      try {
        while (!stop) {
          FSDP(fsdp_write_trace(context, file.c_str()));
          const TraceFile trace(file);
          written += trace.timelines.at(r).at("events") <= 32;
        }
      } catch (const std::exception &error) {
        problem = error.what();
      }
    });
    for (uint32_t step = 0; step < 50; ++step) clean_step(rank, step);
    for (int ms = 0; written < 10 && ms < 20'000; ++ms) pause_ms(1);
    stop = true;
    reader.join();
    REQUIRE(problem.empty());
    FSDP(fsdp_close_context(context));
  });
  EXPECT_GE(written, 10);
}

}  // namespace
