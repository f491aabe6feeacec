// SPDX-License-Identifier: Apache-2.0
// A rank that is killed, at any moment: every other one is told within a second and told whom, nobody hangs, nothing is
// left behind, and the survivors can form a new job. A rank that is only slow is not dead; one that is too slow is a
// timeout.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "harness.h"

using namespace harness;

namespace {

double now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void pause_us(uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

enum class Stage : int { start, bootstrap, seal, forward, backward, finish, step, close, done };
constexpr const char *stage_names[] = {"start",  "bootstrap", "seal",  "forward", "backward",
                                       "finish", "step",      "close", "done"};

constexpr uint32_t most_ranks = 4;

// Where each rank is; in memory that the processes of a world share.
struct Seen {
  std::atomic<Stage> stage[most_ranks];
  std::atomic<uint32_t> steps[most_ranks];
  std::atomic<double> killed_at;
  std::atomic<Stage> killed_in;
};

// What a rank tells its parent.
struct Report {
  fsdp_status status = FSDP_OK;
  int32_t rank = -1;
  Stage stage = Stage::start;
  int32_t recovered = 0;
  double failed_at = 0;
  double destroy_seconds = 0;
  char message[400] = {};
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

Scenario scenario_of(uint32_t ranks, uint32_t timeout_ms) {
  Scenario scenario;
  scenario.ranks = ranks;
  scenario.context.timeout_ms = timeout_ms;
  scenario.model.unshard_mode = ranks % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED;
  scenario.groups = odd_groups();
  return scenario;
}

fsdp_context *join(const Scenario &scenario, uint32_t rank, const std::string &name) {
  fsdp_context_options options = scenario.context;
  options.world_size = scenario.ranks;
  options.rank = rank;
  options.rendezvous = name.c_str();
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_context(&options, &context));
  return context;
}

// A whole life, with its stages for all to see. Throws Failure where a call fails.
void live(const Scenario &scenario, uint32_t rank, const std::string &name, Seen &seen, uint32_t steps,
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
    FSDP(fsdp_finish_grads(self.model, 1.0, nullptr));
    stage = Stage::step;
    double norm = 0;
    FSDP(fsdp_get_grad_norm(self.model, nullptr, &norm));
    FSDP(fsdp_step_adamw(self.model, 0.01, nullptr, nullptr));
    ++seen.steps[rank];
  }
  stage = Stage::close;
  FSDP(fsdp_close_context(context));
  stage = Stage::done;
}

Report describe(const Failure &failure, Stage stage) {
  Report report;
  report.failed_at = now();
  report.status = failure.status;
  report.rank = failure.rank;
  report.stage = stage;
  std::strncpy(report.message, failure.message.c_str(), sizeof report.message - 1);
  return report;
}

// Lives until a call fails, then destroys the context.
Report live_until_failure(const Scenario &scenario, uint32_t rank, const std::string &name, Seen &seen,
                          uint32_t steps) {
  Report report;
  fsdp_context *context = nullptr;
  try {
    live(scenario, rank, name, seen, steps, context);
  } catch (const Failure &failure) {
    report = describe(failure, seen.stage[rank]);
  }
  const double start = now();
  fsdp_destroy_context(context);
  report.destroy_seconds = now() - start;
  return report;
}

// The ranks that are left form a job of their own and train a step.
void recover(const World &world, uint32_t rank, uint32_t victim, Seen &seen, Report &report) {
  if (world.ranks() == 2) {
    report.recovered = 1;  // nobody to form a job with; a world of one needs no bootstrap
    return;
  }
  const Scenario scenario = scenario_of(world.ranks() - 1, 20'000);
  fsdp_context *context = nullptr;
  try {
    live(scenario, rank > victim ? rank - 1 : rank, world.name() + "-again", seen, 1, context);
    report.recovered = 1;
  } catch (const Failure &failure) {
    std::strncpy(report.message, failure.what(), sizeof report.message - 1);
  }
  fsdp_destroy_context(context);
}

// Kills its own process a moment after it has come to the stage: the victim needs no parent's help to die on time.
void doom(Seen &seen, uint32_t rank, Stage stage, uint32_t steps, uint64_t delay_us) {
  std::thread([=, &seen] {
    // A stage of some microseconds may be missed again and again.
    const auto come = [&] {
      const Stage at = seen.stage[rank];
      if (at >= Stage::close) return true;
      if (stage <= Stage::seal) return at >= stage;
      return seen.steps[rank] >= steps && (at == stage || seen.steps[rank] > steps + 100);
    };
    while (!come()) pause_us(20);
    pause_us(delay_us);
    seen.killed_in = seen.stage[rank].load();
    seen.killed_at = now();
    ::kill(::getpid(), SIGKILL);
  }).detach();
}

// Names in /dev/shm, and abstract sockets of jobs.
std::set<std::string> leftovers() {
  std::set<std::string> names;
  for (const auto &entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path());
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);)
    if (const size_t at = line.find("@fsdp-"); at != line.npos) names.insert(line.substr(at));
  return names;
}

// Other tests come and go on this machine: what is left is what stays.
std::string new_leftovers(const std::set<std::string> &before) {
  std::string text;
  for (int tries = 0; tries < 40; ++tries) {
    text.clear();
    for (const std::string &name : leftovers())
      if (!before.contains(name)) text += name + " ";
    if (text.empty()) break;
    pause_us(50'000);
  }
  return text;
}

double allowed_seconds() { return World::worst_delay < 0.05 ? 1.0 : 1.0 + 10 * World::worst_delay; }

struct Kill {
  Stage stage;
  int count;
};

TEST(Death, AtFiftyMoments) {
  const auto before = leftovers();
  std::minstd_rand random(20260729);
  double longest = 0;
  int killed_in[std::size(stage_names)] = {}, trial = 0, late = 0;
  for (const Kill &kill : {Kill{Stage::bootstrap, 6},
                           {Stage::seal, 9},
                           {Stage::forward, 8},
                           {Stage::backward, 9},
                           {Stage::finish, 7},
                           {Stage::step, 6},
                           {Stage::close, 5}})
    for (int i = 0; i < kill.count; ++i, ++trial) {
      const uint32_t ranks = 2 + static_cast<uint32_t>(trial) % 3, victim = static_cast<uint32_t>(random()) % ranks;
      const uint32_t steps = kill.stage >= Stage::forward ? static_cast<uint32_t>(random()) % 6 : 0;
      const uint64_t delay_us = i % 3 == 0 ? 0 : random() % (kill.stage == Stage::bootstrap ? 12'000 : 2'000);
      // Nobody can know a rank that has not come yet: before that it is a timeout.
      const uint32_t timeout_ms = kill.stage == Stage::bootstrap ? 1500 : 20'000;
      const uint32_t life = kill.stage == Stage::close ? steps : 1'000'000;
      World world(ranks);
      Seen &seen = world.seen();
      world.start([&](uint32_t rank) {
        if (rank == victim) doom(seen, rank, kill.stage, steps, delay_us);
        const Scenario scenario = scenario_of(ranks, timeout_ms);
        Report report = live_until_failure(scenario, rank, world.name(), seen, life);
        if (rank == victim)
          for (;;) pause_us(1000);  // it was faster than its death
        if (report.status != FSDP_OK) recover(world, rank, victim, seen, report);
        return report;
      });
      const bool all_ended = world.collect(20);
      const Stage in = seen.killed_in;
      const std::string where = "trial " + std::to_string(trial) + ", rank " + std::to_string(victim) + " of " +
                                std::to_string(ranks) + " killed in " + stage_names[static_cast<int>(in)];
      ASSERT_TRUE(all_ended) << where << ": a rank hangs";
      ++killed_in[static_cast<int>(in)];
      EXPECT_FALSE(world.heard(victim)) << where << ": " << world.report(victim).message;
      for (uint32_t r = 0; r < ranks; ++r) {
        if (r == victim) continue;
        const Report &report = world.report(r);
        ASSERT_TRUE(world.heard(r)) << where << ": rank " << r << " died too";
        // One that had done all its part may die: who needs nothing more from it closes in good order.
        if (in >= Stage::close && report.status == FSDP_OK) continue;
        const std::string what = where + ": rank " + std::to_string(r) + " in " +
                                 stage_names[static_cast<int>(report.stage)] + ": " +
                                 fsdp_get_status_name(report.status) + " " + report.message;
        EXPECT_LT(report.destroy_seconds, allowed_seconds()) << what;
        if (in == Stage::bootstrap && report.stage == Stage::bootstrap && report.status == FSDP_TIMEOUT) {
          // It had not joined yet. Rank 0 tells those who have; who comes after rank 0 gave up misses rank 0.
          ++late;
          EXPECT_TRUE(report.rank == static_cast<int32_t>(victim) || report.rank == 0) << what;
          EXPECT_LT(report.failed_at - seen.killed_at, 2.5 + allowed_seconds()) << what;
          continue;
        }
        EXPECT_EQ(report.status, FSDP_PEER_FAILED) << what;
        EXPECT_EQ(report.rank, static_cast<int32_t>(victim)) << what;
        EXPECT_LT(report.failed_at - seen.killed_at, allowed_seconds()) << what;
        longest = std::max(longest, report.failed_at - seen.killed_at);
        EXPECT_TRUE(report.recovered || in >= Stage::close) << what;
      }
    }
  EXPECT_EQ(new_leftovers(before), "");
  printf("%d kills:", trial);
  for (size_t s = 0; s < std::size(stage_names); ++s)
    if (killed_in[s]) printf(" %d in %s", killed_in[s], stage_names[s]);
  printf(
      "; slowest report %.1f ms after the kill, allowed %.0f ms (worst scheduling delay %.1f ms); %d reports were "
      "timeouts of "
      "a rank that had not joined\n",
      1e3 * longest, 1e3 * allowed_seconds(), 1e3 * World::worst_delay, late);
}

// A rank that has joined and waits for one that does not come: its death is known at once to all who wait with it.
TEST(Death, WhileTheJobForms) {
  for (const uint32_t victim : {0u, 1u, 2u}) {
    World world(4);
    Seen &seen = world.seen();
    world.start([&](uint32_t rank) {
      if (rank == 3) {
        while (seen.killed_at == 0) pause_us(1000);
        pause_us(1'500'000);
        return Report{};
      }
      if (rank == victim) doom(seen, rank, Stage::bootstrap, 0, 300'000);
      return live_until_failure(scenario_of(4, 20'000), rank, world.name(), seen, 1);
    });
    ASSERT_TRUE(world.collect(30)) << "a rank hangs";
    for (uint32_t r = 0; r < 3; ++r) {
      if (r == victim) continue;
      EXPECT_EQ(world.report(r).status, FSDP_PEER_FAILED) << world.report(r).message;
      EXPECT_EQ(world.report(r).rank, static_cast<int32_t>(victim)) << world.report(r).message;
      EXPECT_LT(world.report(r).failed_at - seen.killed_at, allowed_seconds());
      printf("rank %u knew of the death of rank %u after %.1f ms\n", r, victim,
             1e3 * (world.report(r).failed_at - seen.killed_at));
    }
  }
}

// Two at once: one of them is named, the same one everywhere.
TEST(Death, OfTwoRanksAtOnce) {
  World world(4);
  Seen &seen = world.seen();
  world.start([&](uint32_t rank) {
    if (rank == 1 || rank == 3) doom(seen, rank, Stage::backward, 3, 0);
    return live_until_failure(scenario_of(4, 20'000), rank, world.name(), seen, 1'000'000);
  });
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  EXPECT_EQ(world.report(0).status, FSDP_PEER_FAILED) << world.report(0).message;
  EXPECT_EQ(world.report(2).status, FSDP_PEER_FAILED) << world.report(2).message;
  EXPECT_EQ(world.report(0).rank, world.report(2).rank);
  EXPECT_TRUE(world.report(0).rank == 1 || world.report(0).rank == 3) << world.report(0).message;
}

// Stops a rank for a while as soon as it is at a step.
void stop_for(World &world, uint32_t rank, uint32_t step, uint64_t us) {
  const double deadline = now() + 20;
  while (world.seen().steps[rank] < step && now() < deadline) pause_us(100);
  ::kill(world.pid(rank), SIGSTOP);
  pause_us(us);
  ::kill(world.pid(rank), SIGCONT);
}

TEST(Slow, ARankThatIsStoppedForAMomentIsNotDead) {
  constexpr uint32_t steps = 60;
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(scenario_of(3, 20'000), rank, world.name(), world.seen(), steps);
  });
  for (const uint32_t rank : {0u, 1u, 2u}) stop_for(world, rank, 5 + 15 * rank, 400'000);
  ASSERT_TRUE(world.collect(60)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    ASSERT_TRUE(world.heard(r));
    EXPECT_EQ(world.report(r).status, FSDP_OK) << world.report(r).message;
    EXPECT_EQ(world.seen().steps[r], steps);
  }
}

TEST(Slow, ARankThatIsStoppedForTooLongIsATimeoutThatItLearnsOfToo) {
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(scenario_of(3, 500), rank, world.name(), world.seen(), 1'000'000);
  });
  stop_for(world, 1, 5, 1'500'000);
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(world.report(r).status, FSDP_TIMEOUT) << world.report(r).message;
    EXPECT_EQ(world.report(r).rank, 1) << world.report(r).message;
  }
}

TEST(Slow, ARankThatNeverComesIsATimeoutThatNamesIt) {
  for (const Stage absent : {Stage::bootstrap, Stage::seal, Stage::forward, Stage::close}) {
    World world(3);
    world.start([&](uint32_t rank) {
      Scenario scenario = scenario_of(3, 500);
      fsdp_context *context = nullptr;
      Report report;
      if (rank == 2 && absent == Stage::bootstrap) {
        pause_us(1'400'000);
        return report;
      }
      double start = now();
      try {
        context = join(scenario, rank, world.name());
        Rank self(context, scenario, false);
        const auto absence = [&](Stage stage) {
          start = now();
          if (rank == 2 && absent == stage) pause_us(1'400'000);
          return rank == 2 && absent == stage;
        };
        if (absence(Stage::seal)) return report;
        FSDP(fsdp_seal_model(self.model));
        self.load();
        if (absence(Stage::forward)) return report;
        forward(self, nullptr);
        backward(self, 0, 0, nullptr);
        FSDP(fsdp_finish_grads(self.model, 1.0, nullptr));
        FSDP(fsdp_step_adamw(self.model, 0.01, nullptr, nullptr));
        if (absence(Stage::close)) return report;
        FSDP(fsdp_close_context(context));
      } catch (const Failure &failure) {
        report = describe(failure, absent);
        report.failed_at -= start;
      }
      return report;
    });
    ASSERT_TRUE(world.collect(30)) << "a rank hangs";
    for (uint32_t r = 0; r < 2; ++r) {
      const Report &report = world.report(r);
      const std::string what =
          std::string("absent at ") + stage_names[static_cast<int>(absent)] + ": " + report.message;
      EXPECT_EQ(report.status, FSDP_TIMEOUT) << what;
      EXPECT_EQ(report.rank, 2) << what;
      EXPECT_GT(report.failed_at, 0.45) << what;
      EXPECT_LT(report.failed_at, 0.2 + allowed_seconds()) << what;
      EXPECT_NE(std::string(report.message).find("rank 2"), std::string::npos) << what;
    }
  }
}

}  // namespace
