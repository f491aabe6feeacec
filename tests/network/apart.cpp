// SPDX-License-Identifier: Apache-2.0
#include "apart.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "../engine/desync_cases.h"
#include "life.h"

namespace network {
namespace {

using harness::now;
using nlohmann::json;

bool is_wanted(const desync::Case &of, const std::string &list) {
  return list == "all" || ("," + list + ",").find("," + std::string(of.name) + ",") != std::string::npos;
}

// Replicas wait for each other in an all_reduce. They learn at the end of the step that their numbers of micro-batches
// differ.
std::string missing_word(const desync::Case &of, const std::string &message) {
  const std::string inner = "reduce_scatter of ", outer = "all_reduce of ";
  if (message.find("contributions of groups in this step") != message.npos) return "";
  for (const std::string word : of.words) {
    const std::string other = word.starts_with(inner) ? outer + word.substr(inner.size()) : word;
    if (message.find(word) == message.npos && message.find(other) == message.npos) return word;
  }
  return "";
}

// Says why this is not the error that the case must return; empty if it is that error.
std::string problem_of(const desync::Case &of, const harness::Failure &failure) {
  if (std::find(of.statuses.begin(), of.statuses.end(), failure.status) == of.statuses.end()) return "another status";
  const std::string word = missing_word(of, failure.what());
  return word.empty() ? "" : "without the word " + word;
}

void meet_all(fsdp_context *context) {
  double value = 0;
  FSDP(fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM));
}

// Waits until the driver says that all other ranks have learnt the cause. Otherwise they might learn of this rank's
// reaction instead.
void await_others(const desync::Case &of) {
  constexpr int longest_ms = 10'000;
  say({{"told", of.name}, {"waits", of.name}});
  pollfd entry{STDIN_FILENO, POLLIN, 0};
  char line = 0;
  if (::poll(&entry, 1, longest_ms) > 0) (void)!::read(STDIN_FILENO, &line, 1);
}

// called_at is the last moment before the calls that differ. `alone` means that they concern other ranks only, so that
// this rank learns of them and of the other ranks' errors in its next call. All ranks have come to the first meeting
// when some go on, but a rank that is held up may still be in it when others fail.
json call_apart(const desync::Case &of, harness::Rank &rank, const Options &options) {
  json result = {{"case", of.name}, {"alone", false}};
  try {
    meet_all(rank.context);
    if (rank.rank == options.number("late", UINT32_MAX)) harness::pause_ms(300);
    result["called_at"] = now();
    (rank.rank == options.number("odd", 0) ? of.odd : of.usual)(rank);
    result["alone"] = true;
    say({{"told", of.name}});
    meet_all(rank.context);
    result["problem"] = "no call failed";
  } catch (const harness::Failure &failure) {
    result["failed_at"] = now();
    result["text"] = failure.what();
    if (const std::string problem = problem_of(of, failure); !problem.empty() && !result["alone"])
      result["problem"] = problem;
    await_others(of);
    // A rank whose step failed still ends the step, so that no peer waits for it forever.
    if (failure.status == FSDP_INVALID_STATE) fsdp_abort_context(rank.context, "the test ends");
  }
  return result;
}

json live_one(const desync::Case &of, const Options &options) {
  harness::Scenario scenario = scenario_from(options);
  fsdp_context *context = nullptr;
  json result;
  try {
    FSDP(fsdp_create_context(&scenario.context, &context));
    harness::Rank rank(context, scenario);
    rank.load();
    result = call_apart(of, rank, options);
  } catch (const std::exception &error) {
    result = {{"case", of.name}, {"problem", std::string("before the case: ") + error.what()}};
  }
  fsdp_destroy_context(context);
  return result;
}

}  // namespace

json live_apart(const Options &options) {
  json results = json::array();
  int port = std::atoi(std::getenv("MASTER_PORT"));
  std::vector<desync::Case> cases(std::begin(desync::cases), std::end(desync::cases));
  cases.insert(cases.end(), std::begin(desync::number_cases), std::end(desync::number_cases));
  for (const desync::Case &of : cases) {
    if (!is_wanted(of, options.text("cases"))) continue;
    ::setenv("MASTER_PORT", std::to_string(port++).c_str(), 1);
    // A thread for each: a case keeps its second model until its thread ends.
    std::thread([&] { results.push_back(live_one(of, options)); }).join();
  }
  return {{"cases", results}};
}

}  // namespace network
