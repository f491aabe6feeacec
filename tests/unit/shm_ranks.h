// SPDX-License-Identifier: Apache-2.0
// Ranks for the tests of shared memory communication. The same body runs as threads of this process or as forked
// processes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "alone.h"
#include "device/device.h"
#include "sums.h"
#include "transport/team.h"

namespace fsdp::transport::test {

constexpr double patience_seconds = 3;  // for promises of 1 s; machines that run tests are loaded

using DeviceMaker = std::unique_ptr<device::Device> (*)(const device::Options &, const Waiter &, Failure &);

struct RankOptions {
  uint32_t timeout_ms = 20'000;
  device::Options device;
  fsdp_interrupted_hook hook = nullptr;
  void *hook_data = nullptr;
  DeviceMaker make_device = device::create_host_device;
};

// These objects would belong to a context.
struct Rank {
  explicit Rank(const RankOptions &options = {})
      : waiter(failure, options.hook, options.hook_data, options.timeout_ms),
        device(options.make_device(options.device, waiter, failure)) {}

  uint32_t rank() const { return world->rank(); }
  uint32_t size() const { return world->size(); }
  void make_team() {
    std::vector<uint32_t> all(size());
    for (uint32_t r = 0; r < size(); ++r) all[r] = r;
    team = world->create_team(all, "test team");
  }
  void synchronize(device::Stream &stream) {
    auto event = device->create_event();
    stream.record(*event);
    device->synchronize(*event);
    failure.check();
  }
  void meet() {
    char mine = 0;
    std::vector<char> all(size());
    team->all_gather(&mine, 1, all.data(), "test meeting");
  }
  void leave() {
    meet();
    world->leave();
  }

  Failure failure;
  Waiter waiter;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<World> world;
  std::unique_ptr<Team> team;
};

using Body = std::function<void(Rank &)>;

inline void require(bool condition, const std::string &what) {
  if (!condition) throw std::runtime_error(what);
}

inline void require_same_bytes(const std::byte *found, const std::byte *wanted, uint64_t bytes,
                               const std::string &what) {
  if (bytes == 0 || std::memcmp(found, wanted, bytes) == 0) return;
  uint64_t i = 0;
  while (found[i] == wanted[i]) ++i;
  throw std::runtime_error(fmt::format("{}: byte {} of {} is {}, not {}", what, i, bytes,
                                       std::to_integer<int>(found[i]), std::to_integer<int>(wanted[i])));
}

// Returns the error that a call ends with.
template <class Call>
Error error_of(Call &&call) {
  try {
    call();
  } catch (const Error &error) {
    return error;
  }
  return Error(FSDP_OK, "no error");
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns each rank's failure; empty texts mean success. This thread makes the ranks' worlds, as a caller may.
inline std::vector<std::string> run_threads(uint32_t size, const Body &body, const RankOptions &options = {}) {
  auto job = create_local_job(size);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<Rank>(options));
    ranks[r]->world = create_local_world(job, r, ranks[r]->waiter, ranks[r]->failure, *ranks[r]->device);
  }
  std::vector<std::string> problems(size);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        ranks[r]->make_team();
        body(*ranks[r]);
      } catch (const std::exception &error) {
        problems[r] = error.what();
        ranks[r]->world->abort(error.what());
      }
      ranks[r]->team.reset();
      ranks[r]->world.reset();
    });
  for (auto &thread : threads) thread.join();
  return problems;
}

inline std::string unique_rendezvous() {
  static int count = 0;
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

// Runs as rank r and ends the process with 0 if all went well.
[[noreturn]] inline void act_as_process(WorldOptions world, const Body &body, const RankOptions &options) {
  int code = 0;
  try {
    Rank rank(options);
    world.timeout_ms = options.timeout_ms;
    rank.world = create_process_world(world, rank.waiter, rank.failure, *rank.device);
    rank.make_team();
    body(rank);
    rank.team.reset();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "rank %u: %s\n", world.rank, error.what());
    code = 1;
  }
  ::_exit(code);
}

// Forks before this process has any thread of its own.
inline std::vector<pid_t> start_processes(uint32_t size, const Body &body, const RankOptions &options = {},
                                          const std::string &rendezvous = unique_rendezvous()) {
  std::vector<pid_t> processes;
  for (uint32_t r = 0; r < size; ++r) {
    std::fflush(nullptr);
    const pid_t process = ::fork();
    if (process == 0) act_as_process({r, size, rendezvous, "secret", options.timeout_ms}, body, options);
    processes.push_back(process);
  }
  return processes;
}

// Returns exit codes, or minus the signal.
inline std::vector<int> await_processes(const std::vector<pid_t> &processes) {
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    codes.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  }
  return codes;
}

}  // namespace fsdp::transport::test
