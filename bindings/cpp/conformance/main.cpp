// SPDX-License-Identifier: Apache-2.0
//
// The interpreter of the conformance scenarios over fsdp.hpp; bindings/conformance/README.md says what it does.
//
//   cpp_conformance threads SAVE_FOLDER LOAD_FOLDER scenarios.txt
//   fsdp-run -n 2 --no-prefix cpp_conformance processes SAVE_FOLDER LOAD_FOLDER scenarios.txt
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "rank.h"

namespace {

struct Scenario {
  std::string name;
  std::vector<std::uint32_t> worlds;
  std::vector<Line> lines;
};

std::map<std::string, std::string> defines;
std::atomic<bool> all_as_expected{true};

std::string substitute(const std::string &word) { return defines.count(word) ? defines[word] : word; }

Line cut(const std::string &text) {
  Line line;
  line.text = text;
  std::istringstream rest(text);
  for (std::string word; rest >> word;) {
    const std::size_t equals = word.find('=');
    if (line.gives || line.fails)
      line.expected.push_back(substitute(word));
    else if (word == "->")
      line.gives = true;
    else if (word == "!")
      line.fails = true;
    else if (equals != std::string::npos && !line.words.empty())
      line.keys[word.substr(0, equals)] = substitute(word.substr(equals + 1));
    else
      line.words.push_back(substitute(word));
  }
  if (line.word(0) == "on" || line.word(0) == "off") {
    (line.word(0) == "on" ? line.only : line.but) = static_cast<int>(line.integer(1));
    line.words.erase(line.words.begin(), line.words.begin() + 2);
  }
  return line;
}

std::vector<Scenario> read_scenarios(const char *path) {
  std::vector<Scenario> scenarios;
  std::ifstream file(path);
  bool inside = false;
  for (std::string text; std::getline(file, text);) {
    const Line line = cut(text);
    if (line.words.empty() || line.word(0)[0] == '#') continue;
    if (line.word(0) == "define") {
      defines[line.word(1)] = line.word(2);
    } else if (line.word(0) == "scenario") {
      scenarios.push_back({line.word(1), {}, {}});
      for (std::size_t i = 2; i < line.words.size(); ++i)
        scenarios.back().worlds.push_back(static_cast<std::uint32_t>(line.integer(i)));
      inside = true;
    } else if (line.word(0) == "end") {
      inside = false;
    } else if (inside) {
      scenarios.back().lines.push_back(line);
    }
  }
  return scenarios;
}

/** The result of a call. */
struct Outcome {
  fsdp_status status = FSDP_OK;
  int rank = -1;
  std::string value = "-", message;
};

Outcome execute(Rank &rank, const Line &line) {
  Outcome outcome;
  try {
    outcome.value = rank.execute(line);
  } catch (const fsdp::Error &error) {
    outcome = {error.detail().status, error.rank(), "-", error.message()};
  }
  return outcome;
}

bool has_expected_status(const Line &line, const Outcome &outcome) {
  return outcome.status == (line.fails ? std::stoi(line.expected.at(0)) : FSDP_OK);
}

bool is_expected(const Line &line, const Outcome &outcome, std::size_t world) {
  if (!has_expected_status(line, outcome)) return false;
  if (line.fails) return outcome.rank == std::stoi(line.expected.at(1));
  return !line.gives || outcome.value == line.expected.at(line.expected.size() == 1 ? 0 : world);
}

/** The hash of the rank's transcript. */
std::uint32_t run_lines(Rank &rank, const Scenario &scenario, std::size_t world) {
  std::uint32_t transcript = 0;
  int number = 0;
  for (const Line &line : scenario.lines) {
    const int here = static_cast<int>(rank.rank);
    if ((line.only >= 0 && line.only != here) || (line.but >= 0 && line.but == here)) continue;
    const Outcome outcome = execute(rank, line);
    if (line.word(0) == "param" || line.word(0) == "visit") continue;
    const std::string noted = std::to_string(++number) + " " + std::to_string(outcome.status) + " " +
                              std::to_string(outcome.rank) + " " + outcome.value + "\n";
    transcript = crc32_of(transcript, noted.data(), noted.size());
    if (is_expected(line, outcome, world)) continue;
    all_as_expected = false;
    std::fprintf(stderr, "%s, world %u, rank %u: %s\n  gave status %d %s, rank %d: %s\n", scenario.name.c_str(),
                 rank.world_size, rank.rank, line.text.c_str(), outcome.status, outcome.value.c_str(), outcome.rank,
                 outcome.message.c_str());
    if (has_expected_status(line, outcome)) continue;
    rank.context.abort("a status that was not expected");
    break;
  }
  return transcript;
}

void run_rank(fsdp::Context context, const Scenario &scenario, std::size_t world, char **arguments) {
  Rank rank(std::move(context), arguments[2], arguments[3]);
  const std::uint32_t transcript = run_lines(rank, scenario, world);
  std::printf("%s %u %u %s\n", scenario.name.c_str(), rank.world_size, rank.rank, hex(transcript, 8).c_str());
}

fsdp::ContextOptions context_options() {
  fsdp::ContextOptions options;
  options.timeout_ms = 30000;
  return options;
}

void run_threads(const Scenario &scenario, std::size_t world, char **arguments) {
  std::vector<std::thread> threads;
  for (fsdp::Context &context : fsdp::Context::local(scenario.worlds[world], context_options()))
    threads.emplace_back([&scenario, world, arguments, owned = std::move(context)]() mutable {
      run_rank(std::move(owned), scenario, world, arguments);
    });
  for (std::thread &thread : threads) thread.join();
}

void run_process(const Scenario &scenario, char **arguments) {
  const char *launched = std::getenv("WORLD_SIZE");
  const unsigned long world_size = launched ? std::stoul(launched) : 1;
  for (std::size_t world = 0; world < scenario.worlds.size(); ++world)
    if (scenario.worlds[world] == world_size) run_rank(fsdp::Context(context_options()), scenario, world, arguments);
}

}  // namespace

int main(int count, char **arguments) try {
  const std::string how = count == 5 ? arguments[1] : "";
  if (how != "threads" && how != "processes") {
    std::fprintf(stderr, "usage: cpp_conformance threads|processes SAVE_FOLDER LOAD_FOLDER scenarios.txt\n");
    return 2;
  }
  for (const Scenario &scenario : read_scenarios(arguments[4])) {
    if (how == "processes") run_process(scenario, arguments);
    for (std::size_t world = 0; how == "threads" && world < scenario.worlds.size(); ++world)
      run_threads(scenario, world, arguments);
  }
  return all_as_expected ? 0 : 1;
} catch (const std::exception &error) {
  std::fprintf(stderr, "cpp_conformance: %s\n", error.what());
  return 1;
}
