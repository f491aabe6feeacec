// SPDX-License-Identifier: Apache-2.0
// One rank of a job on several hosts, over the public header. Arguments of the form name=value say what it does; the
// launcher's variables say where it is in the job. Each line of its output is JSON; the last line says how the rank
// ended.
//
// threads=N: the whole job in this process, for comparison.
//
// flood=PLACES: it is no rank, but a stranger, see flood.h.
//
// neighbours=N, gpus=chosen|nccl|staging, discard=1: it is the N ranks of its host, on GPUs, see neighbours.h.
//
// replicate, shard, block, ranks_per_host, outer=hfsdp, mode=copied, steps, microbatches, timeout, heartbeat, wide,
// quantized: what is trained, see options.h. pace: milliseconds of pause in every step.
//
// die=STAGE:STEPS:US: it kills itself so; core=FOLDER: by a signal, with a core that takes long. quit=abort|leave,
// quit_step: it aborts, or destroys its context without closing it, in the middle of that step. cases, odd, late: calls
// that differ, see apart.h.
//
// again=NAME=VALUE,...: afterwards a new job in this process, with these variables; again_replicate: of its mesh.
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "apart.h"
#include "flood.h"
#include "levels.h"
#include "life.h"
#include "neighbours.h"
#include "options.h"

namespace network {
namespace {

using nlohmann::json;

// The result with which other jobs are compared is itself compared with the reference, which does not use the library.
json run_threads(const harness::Scenario &scenario) {
  json ranks = json::array();
  const auto outcomes = harness::train_threads(scenario);
  for (const harness::Outcome &outcome : outcomes) ranks.push_back(describe(outcome));
  return {{"ranks", ranks}, {"difference", harness::difference(scenario, outcomes)}};
}

void set_variables(const std::string &list) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t equals = word.find('=');
    ::setenv(word.substr(0, equals).c_str(), word.substr(equals + 1).c_str(), 1);
  }
}

// Runs in a new, small job, with a mesh that any number of ranks can form.
json live_again(const Options &options, Progress &progress) {
  set_variables(options.text("again"));
  harness::Scenario scenario = scenario_from(options);
  scenario.mesh = FSDP_MESH_OPTIONS_INIT;
  scenario.mesh.replicate_size = options.number("again_replicate", 0);
  scenario.context.timeout_ms = 20'000;
  scenario.context.heartbeat_timeout_ms = 0;
  scenario.steps = 2;
  return live(scenario, progress, 0);
}

json run_rank(const Options &options) {
  std::thread([] {}).join();  // a process has these from its first thread on
  const Levels before = settled_levels();
  static Progress progress;  // outlives the thread that kills
  progress.quit = options.text("quit");
  progress.quit_step = options.number("quit_step", 0);
  if (const std::string plan = options.text("die"); !plan.empty()) doom(plan, options.text("core"), progress);
  json result = options.text("cases").empty()
                    ? live(scenario_from(options), progress, static_cast<int>(options.number("pace", 0)))
                    : live_apart(options);
  if (!options.text("die").empty())
    for (;;) harness::pause_ms(1);  // it was faster than its death
  result["before"] = to_json(before);
  result["after"] = to_json(settled_levels());
  if (!options.text("again").empty()) {
    Progress second;
    result["again"] = live_again(options, second);
    result["after_again"] = to_json(settled_levels());
  }
  return result;
}

int run(int count, char **words) {
  try {
    const Options options(count, words);
    say(!options.text("flood").empty()    ? flood(options)
        : options.number("threads", 0)    ? run_threads(scenario_from(options))
        : options.number("neighbours", 0) ? live_as_neighbours(options)
                                          : run_rank(options));
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "network_rank: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace network

int main(int count, char **words) { return network::run(count, words); }
