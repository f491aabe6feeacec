// SPDX-License-Identifier: Apache-2.0
// Makes random calls of the whole public header, correct and wrong ones, in every order. They are made in worlds of one
// and of two ranks and in planning contexts. No sanitizer may report anything, and no call may hang. Each call returns
// a documented status that is not FSDP_INTERNAL, and the thread's last error has the same. After a failure handles are
// NULL and other outputs untouched. At the end every call has succeeded at least once, in a long run also in each
// world. In rounds without deliberate wrong calls most calls succeed, and no context fails.
//
// usage: abi_fuzzer ABI_JSON [--seconds N | --rounds N] [--seed N]
//
// A round follows from its seed alone (but for the threads of a world of two): `--seed N --rounds 1` plays it again.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "rank.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace fuzz {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t longest_call_s = 30;
constexpr uint64_t calls_of_a_long_run = 200'000, telling_calls = 200;
constexpr const char *world_names[world_count] = {"a world of one", "a world of two", "a plan"};

std::atomic<uint64_t> seed_now{0}, calls_made{0};
thread_local const char *call_now = "none";
std::atomic<const char *> last_call{"none"};
// How often a call returned each status, in each world and in the rounds without deliberate wrong calls.
struct Given {
  using Counts = std::array<std::atomic<uint64_t>, FSDP_INTERNAL + 1>;
  Counts in[world_count], tame[world_count];
};
std::map<std::string, Given> statuses;

void say_how_to_replay() {
  std::fprintf(stderr, "abi_fuzzer: in %s, of seed %llu\nabi_fuzzer: replay: sh tests/fuzz/replay.sh %llu\n", call_now,
               static_cast<unsigned long long>(seed_now.load()), static_cast<unsigned long long>(seed_now.load()));
}

void watch(std::stop_token stop) {
  uint64_t before = 0;
  for (auto since = Clock::now(); !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(200))) {
    const uint64_t now = calls_made.load();
    if (std::exchange(before, now) != now) since = Clock::now();
    if (Clock::now() - since < std::chrono::seconds(longest_call_s)) continue;
    std::fprintf(stderr, "abi_fuzzer: no call has returned for %lld s; the last one made was %s\n",
                 static_cast<long long>(longest_call_s), last_call.load());
    call_now = last_call.load();
    std::abort();
  }
}

size_t open_files() {
  size_t count = 0;
  DIR *const directory = opendir("/proc/self/fd");
  while (directory && readdir(directory)) ++count;
  if (directory) closedir(directory);
  return count;
}

void play(Rank &rank, Random &random) {
  for (uint64_t i = 1 + random.below(3); i > 0; --i) {
    declare(rank);
    train(rank);
    for (uint64_t k = random.below(200); rank.wildness && k > 0; --k) call_anything(rank);
  }
  leave(rank);
}

// Plays a world of two. Both ranks make the same calls; in a wild round one of them sometimes makes a different call.
void play_two(uint64_t seed, Random &random, uint64_t wildness) {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.timeout_ms = wildness == 0 ? patient_ms : hasty_ms;
  options.flags = random.one_in(3) ? FSDP_CONTEXT_NO_OVERLAP : 0;
  fsdp_context *contexts[2] = {};
  require(fsdp_create_local_contexts(2, &options, contexts) == FSDP_OK, "no world of two");
  Elsewhere elsewhere;
  const uint64_t stray = random.one_in(3) ? random.below(2) : 2;  // this rank's random numbers differ
  const auto live = [&](uint64_t index) {
    Rank rank(seed + (index == stray), elsewhere);
    rank.alone = false;
    rank.tame = wildness == 0 && stray == 2;
    rank.world_size = 2;
    rank.wildness = wildness;
    rank.add(a_context, contexts[index]);
    Random own(seed);
    play(rank, own);
  };
  std::thread second(live, 1);
  live(0);
  second.join();
}

void play_one(uint64_t seed, Random &random, uint64_t wildness) {
  Elsewhere elsewhere;
  Rank rank(seed, elsewhere);
  rank.plans = random.one_in(5);
  rank.tame = wildness == 0;
  if (rank.tame) rank.timeout_ms = patient_ms;
  const char *const made = rank.plans         ? "fsdp_create_plan_context"
                           : random.one_in(2) ? "fsdp_create_context"
                                              : "fsdp_create_local_contexts";
  while (rank.alive[a_context].empty()) call(rank, made);
  rank.wildness = wildness;
  play(rank, random);
}

// Saves a folder with one checkpoint of a model that no round has, and of some bytes.
void save_first(const char *folder) {
  fsdp_context *context = nullptr;
  fsdp_model *model = nullptr;
  fsdp_checkpoint *checkpoint = nullptr;
  const uint64_t shape[] = {3};
  fsdp_param param = FSDP_PARAM_INIT;
  param.name = "first";
  param.shape = shape;
  param.dimension_count = 1;
  fsdp_group *group = nullptr;
  std::filesystem::remove_all(folder);
  fsdp_status status = fsdp_create_local_contexts(1, nullptr, &context);
  if (!status) status = fsdp_create_model(context, nullptr, &model);
  if (!status) status = fsdp_create_group(model, "g", &param, 1, sizeof param, nullptr, &group);
  if (!status) status = fsdp_seal_model(model);
  if (!status) status = fsdp_publish_weights(model, nullptr);
  if (!status) status = fsdp_begin_checkpoint(context, folder, nullptr, &checkpoint);
  if (!status) status = fsdp_add_checkpoint_model(checkpoint, nullptr, model);
  if (!status) status = fsdp_add_checkpoint_bytes(checkpoint, "a", "bytes", 5, FSDP_BYTES_ONCE);
  if (!status) status = fsdp_commit_checkpoint(checkpoint);
  if (!status) status = fsdp_wait_checkpoint(checkpoint);
  if (status) give_up(std::string("no first checkpoint: ") + fsdp_get_status_name(status));
  fsdp_destroy_checkpoint(checkpoint);
  fsdp_destroy_context(context);
}

// Every round finds the same files, whatever earlier rounds have left.
void begin_folder() {
  std::filesystem::remove_all("fuzz-checkpoints");
  std::filesystem::remove_all("fuzz-own");
  std::filesystem::copy("fuzz-first", "fuzz-checkpoints", std::filesystem::copy_options::recursive);
}

void play_round(uint64_t seed) {
  static constexpr uint64_t wildnesses[] = {0, 8, 30, 100, 400};
  seed_now = seed;
  begin_folder();
  Random random(seed);
  const uint64_t wildness = wildnesses[random.below(std::size(wildnesses))];
  if (random.one_in(5))
    play_two(seed, random, wildness);
  else
    play_one(seed, random, wildness);
}

// Returns whether the header's calls are those of the cases here.
bool check_names(const char *path) {
  std::ifstream file(path);
  bool same = true;
  std::vector<std::string> names;
  const auto abi = nlohmann::json::parse(file);
  for (const auto &entry : abi.at("calls")) names.push_back(entry.at("name"));
  const auto &cases = all_cases();
  for (const auto &name : names)
    if (std::ranges::none_of(cases, [&](const Case &known) { return known.name == name; }))
      same = (std::fprintf(stderr, "abi_fuzzer: %s is in the header, but has no case in tests/fuzz\n", name.c_str()),
              false);
  for (const Case &known : cases)
    if (std::ranges::find(names, known.name) == names.end())
      same = (std::fprintf(stderr, "abi_fuzzer: %s has a case, but is not in the header\n", known.name), false);
  return same;
}

uint64_t sum(const Given::Counts &counts) {
  uint64_t all = 0;
  for (const auto &count : counts) all += count;
  return all;
}

// Returns whether a planning context makes this call as a real one does. The header says that it refuses all calls that
// touch data.
bool belongs_to_plans(const std::string &name) {
  static constexpr const char *declaring[] = {
      "fsdp_create_plan_context", "fsdp_create_mesh", "fsdp_create_model", "fsdp_create_group", "fsdp_set_schedule",
      "fsdp_add_optimizer_state", "fsdp_set_arena",   "fsdp_check_model",  "fsdp_seal_model"};
  return std::ranges::find(declaring, name) != std::end(declaring);
}

// Few of these calls succeed. States need a made-up name, planes need a quantized parameter, and rounding needs a
// parameter without main weights. Restored views need a model with writable views. Matrix calls need a model with
// matrices, and a window after the gradients have been reduced. Chunks need a home in a file.
bool is_for_few(const std::string &name) {
  static constexpr const char *few[] = {"fsdp_add_optimizer_state", "fsdp_collect_matrices",     "fsdp_get_plane",
                                        "fsdp_load_plane",          "fsdp_next_matrix",          "fsdp_restore_view",
                                        "fsdp_return_matrices",     "fsdp_round_stochastic",     "fsdp_swizzle_scales",
                                        "fsdp_next_shard_chunk",    "fsdp_get_shard_chunk_state"};
  return std::ranges::find(few, name) != std::end(few);
}

// Describes a wrong number of a call's successes in a world; empty if the number is right. At least a quarter of the
// tame calls must succeed.
std::string problem_of(const std::string &name, const Given &given, int world) {
  const Given::Counts &tame = given.tame[world];
  const bool planned = belongs_to_plans(name), expected = world != plan_world || planned;
  if (!expected) return tame[FSDP_OK] ? "has succeeded, though it would touch data" : "";
  if (!is_for_few(name) && sum(tame) >= telling_calls && 4 * tame[FSDP_OK] < sum(tame))
    return "has nearly never succeeded where nobody makes wrong calls";
  return calls_made >= calls_of_a_long_run && !given.in[world][FSDP_OK] ? "has never succeeded" : "";
}

bool has_succeeded(const char *name) {
  const Given &given = statuses[name];
  return std::any_of(std::begin(given.in), std::end(given.in), [](const auto &in) { return in[FSDP_OK] > 0; });
}

bool have_all_succeeded() {
  const auto &cases = all_cases();
  return std::all_of(cases.begin(), cases.end(),
                     [](const Case &known) { return !known.on_host || has_succeeded(known.name); });
}

bool check_coverage() {
  bool covered = true;
  for (const Case &known : all_cases()) {
    if (!known.on_host) continue;
    const Given &given = statuses[known.name];
    for (int world = 0; world < world_count; ++world) {
      const std::string problem = problem_of(known.name, given, world);
      if (problem.empty()) continue;
      covered =
          (std::fprintf(stderr, "abi_fuzzer: %s %s (%s)\n", known.name, problem.c_str(), world_names[world]), false);
    }
    if (!has_succeeded(known.name))
      covered = (std::fprintf(stderr, "abi_fuzzer: %s has never succeeded\n", known.name), false);
  }
  return covered;
}

void show(const char *name, const char *where, const Given::Counts &counts) {
  if (!sum(counts)) return;
  std::printf("%-28s %-16s", name, where);
  for (fsdp_status status = 0; status <= FSDP_INTERNAL; ++status)
    if (const uint64_t count = counts[static_cast<size_t>(status)])
      std::printf(" %s %llu", fsdp_get_status_name(status) + 5, static_cast<unsigned long long>(count));
  std::printf("\n");
}

void show_statuses() {
  for (const auto &[name, given] : statuses)
    for (int world = 0; world < world_count; ++world) {
      show(name.c_str(), world_names[world], given.in[world]);
      show("", "... tame", given.tame[world]);
    }
}

struct Options {
  uint64_t seed = 1, rounds = UINT64_MAX, seconds = UINT64_MAX;
};

Options read(int argc, char **argv) {
  Options options;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--seed") options.seed = value;
    if (name == "--rounds") options.rounds = value;
    if (name == "--seconds") options.seconds = value;
  }
  return options;
}

int run(int argc, char **argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: abi_fuzzer ABI_JSON [--seconds N | --rounds N] [--seed N]\n"), 2;
  if (!check_names(argv[1])) return 1;
  const Options options = read(argc, argv);
  for (const Case &known : all_cases()) statuses[known.name];
  mkdir("fuzz-traces", 0777);
  save_first("fuzz-first");
  const std::jthread watcher(watch);
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  play_round(options.seed);  // objects that a process makes once exist before the first count
  const size_t files = open_files();
  // A busy machine needs more time for the same number of calls.
  const auto is_over = [&, limit = static_cast<double>(options.seconds)] {
    return seconds() >= limit && (have_all_succeeded() || seconds() >= 48 * limit);
  };
  uint64_t rounds = 1;
  for (; rounds < options.rounds && !is_over(); ++rounds) {
    play_round(options.seed + rounds);
    // A thread that the disk held up may still close its file.
    for (int ms = 0; ms < 10'000 && open_files() > files; ++ms)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    require(open_files() <= files, "a round has left files open");
  }
  show_statuses();
  const auto made = static_cast<double>(calls_made.load());
  std::printf("abi_fuzzer: %.0f calls in %llu rounds from seed %llu, %.0f a second\n", made,
              static_cast<unsigned long long>(rounds), static_cast<unsigned long long>(options.seed), made / seconds());
  return options.rounds == UINT64_MAX && !check_coverage() ? 1 : 0;
}

}  // namespace

void give_up(const std::string &why) {
  std::fprintf(stderr, "abi_fuzzer: %s\n", why.c_str());
  fsdp_error error = FSDP_ERROR_INIT;
  if (fsdp_get_last_error(nullptr, &error) == FSDP_OK && error.status)
    std::fprintf(stderr, "last error: %s\n", error.message);
  std::abort();
}

const std::vector<Case> &all_cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> cases;
    for (const auto *some :
         {&checkpoint_cases(), &context_cases(), &model_cases(), &group_cases(), &lookup_cases(), &optimizer_cases()})
      cases.insert(cases.end(), some->begin(), some->end());
    return cases;
  }();
  return all;
}

// Checks that the thread's last error has this status, and a text.
static void check_detail(const char *name, fsdp_status status) {
  fsdp_error error = FSDP_ERROR_INIT;
  require(fsdp_get_last_error(nullptr, &error) == FSDP_OK, "no last error");
  if (error.status != status || !error.message[0])
    give_up(std::string(name) + " gave " + fsdp_get_status_name(status) + ", the last error is " +
            fsdp_get_status_name(error.status) + " '" + error.message + "'");
}

fsdp_status call(Rank &rank, const Case &chosen) {
  call_now = chosen.name;
  last_call = chosen.name;
  const fsdp_status status = chosen.run(rank);
  ++calls_made;
  if (status < FSDP_OK || status > FSDP_INTERNAL)
    give_up(std::string(chosen.name) + " gave the unknown status " + std::to_string(status));
  if (status == FSDP_INTERNAL) give_up(std::string(chosen.name) + " gave FSDP_INTERNAL");
  if (status != FSDP_OK) check_detail(chosen.name, status);
  // After its wait a rank may leave while its peer still waits, even without closing its context.
  const bool left_alone = status == FSDP_PEER_FAILED && rank.peer_left();
  if (rank.tame && status > FSDP_UNSUPPORTED && !left_alone)
    give_up(std::string(chosen.name) + " fails where nobody makes wrong calls");
  Given &given = statuses.find(chosen.name)->second;
  ++given.in[rank.world()][static_cast<size_t>(status)];
  if (rank.tame) ++given.tame[rank.world()][static_cast<size_t>(status)];
  return status;
}

fsdp_status call(Rank &rank, const char *name) {
  const auto &cases = all_cases();
  const auto found = std::ranges::find_if(cases, [&](const Case &known) { return !std::strcmp(known.name, name); });
  require(found != cases.end(), name);
  return call(rank, *found);
}

// Makes any call, but seldom one that makes or ends a context, because that would soon end the round.
void call_anything(Rank &rank) {
  static constexpr const char *seldom[] = {
      "fsdp_destroy_context",       "fsdp_abort_context",       "fsdp_close_context", "fsdp_create_context",
      "fsdp_create_local_contexts", "fsdp_create_plan_context", "fsdp_destroy_model"};
  const auto &cases = all_cases();
  const Case &chosen = cases[rank.random.below(cases.size())];
  const bool rare = std::ranges::any_of(seldom, [&](const char *name) { return !std::strcmp(name, chosen.name); });
  if (rare && !rank.random.one_in(16)) return;
  rank.aim_anywhere();
  call(rank, chosen);
}

}  // namespace fuzz

int main(int argc, char **argv) {
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(fuzz::say_how_to_replay);
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) {
    if (__sanitizer_set_death_callback && number != SIGABRT) continue;  // the sanitizer has them
    std::signal(number, [](int caught) {
      fuzz::say_how_to_replay();
      std::signal(caught, SIG_DFL);
      std::raise(caught);
    });
  }
  return fuzz::run(argc, argv);
}
