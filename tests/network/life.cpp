// SPDX-License-Identifier: Apache-2.0
#include "life.h"

#include "../slow_core.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <sstream>
#include <thread>

namespace network {
namespace {

using harness::now;
using nlohmann::json;

void pause_us(uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

std::string hex(uint64_t bits) {
  char text[17];
  std::snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(bits));
  return text;
}

std::string hash(const std::vector<std::vector<float>> &weights) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const auto &values : weights)
    for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3;
  return hex(hash);
}

// Hashes everything that was read in every visit.
std::string hash(const std::vector<harness::View> &views) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const harness::View &view : views)
    for (const uint64_t part :
         {uint64_t{view.version}, uint64_t{view.ordinal}, static_cast<uint64_t>(view.phase), view.hash})
      hash = (hash ^ part) * 0x100000001b3;
  return hex(hash);
}

// Aborts or leaves with reduces under way.
void quit(fsdp_context *context, const std::string &how) {
  say({{"quit_at", now()}});
  if (how == "leave") throw harness::Failure(FSDP_OK, "leaving", "without a close", -1);
  FSDP(fsdp_abort_context(context, "the test says so"));
}

// Trains as harness::train does, and sets the stages.
void train(harness::Rank &rank, harness::Outcome &outcome, Progress &progress, int pace_ms) {
  const harness::Scenario &setup = rank.setup;
  progress.stage = Stage::load;
  rank.load();
  outcome.version = 1;
  say({{"training", now()}});
  for (uint32_t step = 0; step < setup.steps; ++step) {
    if (pace_ms) harness::pause_ms(pace_ms);
    for (uint32_t m = 0; m < setup.microbatches; ++m) {
      progress.stage = Stage::forward;
      harness::forward(rank, &outcome);
      progress.stage = Stage::backward;
      harness::backward(rank, step, m, &outcome);
    }
    if (!progress.quit.empty() && step == progress.quit_step) quit(rank.context, progress.quit);
    progress.stage = Stage::finish;
    FSDP(fsdp_finish_grads(rank.model, setup.scale, 0, nullptr));
    progress.stage = Stage::step;
    double norm = 0;
    FSDP(fsdp_clip_grads(rank.model, nullptr, setup.clip, nullptr, &norm));
    outcome.norms.push_back(norm);
    harness::update(rank);
    ++outcome.version;
    ++progress.steps;
  }
  outcome.stats = rank.stats();
  outcome.memory = harness::memory_of(rank.model, rank.rank);
  outcome.weights = rank.read_all();
}

}  // namespace

void say(const json &line) {
  const std::string text = line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  if (::write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(3);
}

// Kills the process from inside, because no other process knows in time which stage it has reached.
void doom(const std::string &plan, const std::string &core, const Progress &progress) {
  std::istringstream words(plan);
  std::string stage, steps, delay;
  std::getline(words, stage, ':');
  std::getline(words, steps, ':');
  std::getline(words, delay);
  const auto at =
      static_cast<size_t>(std::find(std::begin(stage_names), std::end(stage_names), stage) - std::begin(stage_names));
  if (at == std::size(stage_names)) throw std::runtime_error("no stage " + stage);
  const auto wanted = static_cast<Stage>(at);
  const auto die = [&progress, core] {
    if (const std::string why = core.empty() ? "" : slow_core::missing(); !why.empty()) say({{"unable", why}});
    say({{"killed_at", now()}, {"killed_in", stage_names[static_cast<int>(progress.stage.load())]}});
    if (!core.empty()) slow_core::die(core.c_str());
    ::kill(::getpid(), SIGKILL);
  };
  if (wanted == Stage::start && std::stoul(delay) == 0) die();  // before it has sent anything to any rank
  std::thread([=, &progress, steps = std::stoul(steps), delay = std::stoul(delay)] {
    // The kill may miss a stage of some microseconds many times.
    const auto come = [&] {
      const Stage now = progress.stage;
      if (now >= Stage::close || wanted < Stage::forward) return now >= wanted;
      return progress.steps >= steps && (now == wanted || progress.steps > steps + 50);
    };
    while (!come()) pause_us(20);
    pause_us(delay);
    die();
  }).detach();
}

json describe(const harness::Outcome &outcome) {
  json result = {{"status", "FSDP_OK"},
                 {"weights", hash(outcome.weights)},
                 {"views", hash(outcome.views)},
                 {"norms", json::array()}};
  for (const double norm : outcome.norms) result["norms"].push_back(hex(std::bit_cast<uint64_t>(norm)));
  const harness::Stats &stats = outcome.stats;
  result["counts"] = {{"reduce_scatters", stats.reduce_scatters},
                      {"outer_all_reduces", stats.outer_all_reduces},
                      {"outer_reduce_scatters", stats.outer_reduce_scatters},
                      {"outer_all_gathers", stats.outer_all_gathers}};
  result["outer_sent_bytes"] = stats.outer_sent_bytes;
  result["planned"] = outcome.memory.role_bytes;
  result["allocated"] = stats.allocated_bytes;
  return result;
}

json describe(const harness::Failure &failure, Stage stage) {
  return {{"failed_at", now()},
          {"status", fsdp_get_status_name(failure.status)},
          {"blamed", failure.rank},
          {"text", failure.what()},
          {"stage", stage_names[static_cast<int>(stage)]}};
}

// Writes one of the process's lines, which the driver reads like any other.
void say_log(void *, fsdp_log_level level, const char *message) { say({{"log", message}, {"level", level}}); }

json live(const harness::Scenario &scenario, Progress &progress, int pace_ms) {
  json result;
  fsdp_context *context = nullptr;
  fsdp_context_options options = scenario.context;
  options.log = say_log;
  progress.stage = Stage::bootstrap;
  try {
    FSDP(fsdp_create_context(&options, &context));
    progress.stage = Stage::seal;
    harness::Outcome outcome;
    harness::Rank rank(context, scenario);
    train(rank, outcome, progress, pace_ms);
    progress.stage = Stage::close;
    FSDP(fsdp_close_context(context));
    result = describe(outcome);
  } catch (const harness::Failure &failure) {
    result = describe(failure, progress.stage);
    say({{"failed_at", result["failed_at"]}});  // a driver waits for it
  }
  progress.stage = Stage::destroy;
  const double start = now();
  fsdp_destroy_context(context);
  result["destroy_seconds"] = now() - start;
  progress.stage = Stage::done;
  return result;
}

}  // namespace network
