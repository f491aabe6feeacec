// SPDX-License-Identifier: Apache-2.0
// Worlds of processes whose ranks may die or be late: the stage of each rank, and the errors of the others.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "harness.h"

namespace harness {

// The promise is 1 s, but machines that run tests hold threads up. The limit is below the heartbeat limit and the
// timeouts, which would end the same waits.
inline constexpr double at_once = 5;

inline void pause_us(uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

enum class Stage : int { start, bootstrap, seal, forward, backward, finish, step, close, done };
constexpr const char *stage_names[] = {"start",  "bootstrap", "seal",  "forward", "backward",
                                       "finish", "step",      "close", "done"};

constexpr uint32_t max_ranks = 4;

// Where each rank is; in memory that the processes of a world share.
struct Seen {
  std::atomic<Stage> stage[max_ranks];
  std::atomic<uint32_t> steps[max_ranks];
  std::atomic<double> killed_at;
  std::atomic<Stage> killed_in;
};

// The result that a rank writes for its parent.
struct Report {
  fsdp_status status = FSDP_OK;
  int32_t rank = -1;
  Stage stage = Stage::start;
  int32_t recovered = 0;
  uint64_t failed_count = 0;  // fsdp_get_failed_ranks
  uint32_t failed[max_ranks] = {};
  double failed_at = 0;
  double destroy_seconds = 0;
  char message[1024] = {};
};

class World {
 public:
  explicit World(uint32_t ranks) : ranks_(ranks) {
    static int counter = 0;
    name_ = "death-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
    void *shared = ::mmap(nullptr, sizeof(Seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) throw std::runtime_error("mmap failed");
    seen_ = new (shared) Seen{};
  }
  ~World() {
    for (const pid_t pid : pids_)
      if (pid > 0) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    for (const int pipe : pipes_) ::close(pipe);
    ::munmap(seen_, sizeof(Seen));
  }
  World(const World &) = delete;
  World &operator=(const World &) = delete;

  uint32_t ranks() const { return ranks_; }
  Seen &seen() { return *seen_; }
  pid_t pid(uint32_t rank) const { return pids_[rank]; }
  const std::string &name() const { return name_; }

  // body returns the child's report.
  void start(const std::function<Report(uint32_t)> &body) {
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      int ends[2];
      if (::pipe(ends)) throw std::runtime_error("pipe failed");
      const pid_t pid = ::fork();
      if (pid == 0) {
        Report report;
        try {
          report = body(rank);
        } catch (const std::exception &error) {
          report.status = -1;
          std::strncpy(report.message, error.what(), sizeof report.message - 1);
        }
        ::_exit(::write(ends[1], &report, sizeof report) == sizeof report ? 0 : 3);
      }
      ::close(ends[1]);
      pids_.push_back(pid);
      pipes_.push_back(ends[0]);
    }
  }

  // Every rank's report; a rank that was killed has none. False if one hangs.
  bool collect(double seconds) {
    reports_.assign(ranks_, {});
    heard_.assign(ranks_, false);
    std::vector<bool> ended(ranks_);
    const double deadline = now() + seconds;
    while (std::count(ended.begin(), ended.end(), true) < ranks_) {
      std::vector<pollfd> polls;
      for (uint32_t r = 0; r < ranks_; ++r) polls.push_back({ended[r] ? -1 : pipes_[r], POLLIN, 0});
      const double before = now();
      if (::poll(polls.data(), polls.size(), 10) == 0) worst_delay = std::max(worst_delay, now() - before - 0.010);
      for (uint32_t r = 0; r < ranks_; ++r)
        if (polls[r].revents) {
          heard_[r] = ::read(pipes_[r], &reports_[r], sizeof(Report)) == sizeof(Report);
          ended[r] = true;
        }
      if (now() > deadline) return false;
    }
    for (pid_t &pid : pids_) ::waitpid(std::exchange(pid, -1), nullptr, 0);
    return true;
  }
  bool heard(uint32_t rank) const { return heard_[rank]; }
  const Report &report(uint32_t rank) const { return reports_[rank]; }

  // How much later than asked this process was woken at worst: what the machine adds to every time measured here.
  static inline double worst_delay = 0;

 private:
  uint32_t ranks_;
  std::string name_;
  Seen *seen_;
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
  std::vector<Report> reports_;
  std::vector<bool> heard_;
};

inline Scenario mortal_scenario(uint32_t ranks, uint32_t timeout_ms) {
  Scenario scenario =
      scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, ranks % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
  scenario.context.timeout_ms = timeout_ms;
  return scenario;
}

// A whole training run whose stages are visible to all. Throws Failure where a call fails.
inline void live(const Scenario &scenario, uint32_t rank, const std::string &name, Seen &seen, uint32_t steps,
                 fsdp_context *&context) {
  auto &stage = seen.stage[rank];
  stage = Stage::bootstrap;
  context = join(scenario, rank, name);
  stage = Stage::seal;
  Rank self(context, scenario);
  self.load();
  for (uint32_t step = 0; step < steps; ++step) {
    stage = Stage::forward;
    forward(self, nullptr);
    stage = Stage::backward;
    backward(self, step, 0, nullptr);
    stage = Stage::finish;
    FSDP(fsdp_finish_grads(self.model, 1.0, 0, nullptr));
    stage = Stage::step;
    double norm = 0;
    FSDP(fsdp_get_grad_norm(self.model, nullptr, nullptr, &norm));
    FSDP(fsdp_step_adamw(self.model, 0.01, nullptr, nullptr));
    ++seen.steps[rank];
  }
  stage = Stage::close;
  FSDP(fsdp_close_context(context));
  stage = Stage::done;
}

inline Report describe(const Failure &failure, Stage stage) {
  Report report;
  report.failed_at = now();
  report.status = failure.status;
  report.rank = failure.rank;
  report.stage = stage;
  std::strncpy(report.message, failure.message.c_str(), sizeof report.message - 1);
  return report;
}

// Lives until a call fails, then destroys the context.
inline Report live_until_failure(const Scenario &scenario, uint32_t rank, const std::string &name, Seen &seen,
                                 uint32_t steps) {
  Report report;
  fsdp_context *context = nullptr;
  try {
    live(scenario, rank, name, seen, steps, context);
  } catch (const Failure &failure) {
    report = describe(failure, seen.stage[rank]);
    report.failed_count = max_ranks;
    if (!context || fsdp_get_failed_ranks(context, report.failed, &report.failed_count) != FSDP_OK)
      report.failed_count = 0;
  }
  const double start = now();
  fsdp_destroy_context(context);
  report.destroy_seconds = now() - start;
  return report;
}

}  // namespace harness
