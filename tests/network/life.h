// SPDX-License-Identifier: Apache-2.0
// Runs one rank and reports each stage. The rank trains by the launcher's variables, may kill itself at a chosen
// moment, and reports its observations at the end.
#pragma once

#include <atomic>
#include <string>

#include <nlohmann/json.hpp>

#include "../engine/harness.h"

namespace network {

enum class Stage : int { start, bootstrap, seal, load, forward, backward, finish, step, close, destroy, done };
constexpr const char *stage_names[] = {"start",  "bootstrap", "seal",  "load",    "forward", "backward",
                                       "finish", "step",      "close", "destroy", "done"};

struct Progress {
  std::atomic<Stage> stage{Stage::start};
  std::atomic<uint32_t> steps{0};
  std::string quit;  // "abort" or "leave", in the middle of the step with this number
  uint32_t quit_step = 0;
};

// One line of JSON on stdout, written at once.
void say(const nlohmann::json &line);
// plan is "STAGE:STEPS:MICROSECONDS". Kills the process that long after it reached the stage, once it has made that
// many steps.
void doom(const std::string &plan, const std::string &core, const Progress &progress);
nlohmann::json describe(const harness::Outcome &outcome);
nlohmann::json describe(const harness::Failure &failure, Stage stage);
// Makes a context from the launcher's variables, lives one life, and destroys the context. pace_ms is a pause in every
// step.
nlohmann::json live(const harness::Scenario &scenario, Progress &progress, int pace_ms);

}  // namespace network
