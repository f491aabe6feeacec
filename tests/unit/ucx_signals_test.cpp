// SPDX-License-Identifier: Apache-2.0
// The program's signals are its own. UCX takes some when it is loaded, and starts a thread; here it leaves them alone.
// This test comes first in its process, so that handlers from before the load are unchanged.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "net_ranks.h"

namespace fsdp::transport::test {
namespace {

constexpr int last_signal = 64;
constexpr int set_by_libc = 0x04000000;  // SA_RESTORER, whatever flags sigaction sets
constexpr uint64_t bit(int number) { return uint64_t{1} << (number - 1); }
// All signals except SIGKILL, SIGSTOP, the two that glibc keeps for itself, and the thread's own faults.
constexpr uint64_t every_signal =
    ~(bit(SIGKILL) | bit(SIGSTOP) | bit(32) | bit(33) | bit(SIGSEGV) | bit(SIGBUS) | bit(SIGFPE) | bit(SIGILL));

std::atomic<pid_t> taken_by{0};
void take(int) { taken_by = ::gettid(); }

std::map<int, struct sigaction> actions() {
  std::map<int, struct sigaction> all;
  for (int number = 1; number <= last_signal; ++number) ::sigaction(number, nullptr, &all[number]);
  return all;
}

uint64_t blocked_by(const std::string &task) {
  std::ifstream file(task + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("SigBlk:")) return std::stoull(line.substr(7), nullptr, 16);
  ADD_FAILURE() << task << " has no SigBlk";
  return 0;
}

TEST(UcxSignals, HandlersAreTheProgramsOwn) {
  ::unsetenv("UCX_HANDLE_ERRORS");
  struct sigaction own {};
  own.sa_handler = take;
  for (const int number : {SIGSEGV, SIGUSR1}) ASSERT_EQ(::sigaction(number, &own, nullptr), 0);
  const auto before = actions();
  const auto net = create_ucx_net(0, false);
  for (const auto &[number, action] : actions()) {
    EXPECT_EQ(action.sa_handler, before.at(number).sa_handler) << "signal " << number;
    EXPECT_EQ(action.sa_flags & ~set_by_libc, before.at(number).sa_flags & ~set_by_libc) << "signal " << number;
  }
  EXPECT_EQ(std::getenv("UCX_HANDLE_ERRORS"), nullptr) << "the environment is the program's too";
}

TEST(UcxSignals, NoThreadOfTheLibraryTakesOne) {
  const auto net = create_ucx_net(0, false);
  size_t others = 0;
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::getpid())) continue;
    ++others;
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    // A thread begins with more signals blocked, whatever mask it was given.
    for (int tries = 0; tries < 10'000 && blocked_by(task.path()) != every_signal; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(blocked_by(task.path()), every_signal) << name;
  }
  EXPECT_GE(others, 2u);  // the threads fsdp-ucx and UCX's own
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
  ::kill(::getpid(), SIGUSR1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(taken_by, 0);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(taken_by, ::getpid());
}

}  // namespace
}  // namespace fsdp::transport::test
