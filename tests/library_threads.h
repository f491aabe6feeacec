// SPDX-License-Identifier: Apache-2.0
// The threads of the library that live in this process: what a test counts to see that they end.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>

namespace fsdp::test {

inline size_t library_threads() {
  size_t count = 0;
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name.starts_with("fsdp-");
  }
  return count;
}

// Their number once it is the wanted one, or after 10 s: a thread that was joined is still listed for a moment.
inline size_t await_library_threads(size_t wanted) {
  using namespace std::chrono_literals;
  const auto end = std::chrono::steady_clock::now() + 10s;
  size_t count = library_threads();
  for (; count != wanted && std::chrono::steady_clock::now() < end; count = library_threads())
    std::this_thread::sleep_for(1ms);
  return count;
}

// Does this thread of the process sleep, as one does that waits? One that works or spins does not.
inline bool is_asleep(const std::filesystem::path &task) {
  std::string key, state;
  std::ifstream status(task / "status");
  while (key != "State:" && status >> key) {
  }
  return status >> state && state == "S";
}

// Until the thread sleeps in what it was told to do: true. False: it has done it.
inline bool await_asleep(pid_t thread, const std::atomic<bool> &done) {
  using namespace std::chrono_literals;
  const std::filesystem::path task = "/proc/self/task/" + std::to_string(thread);
  while (!done && !is_asleep(task)) std::this_thread::sleep_for(1ms);
  return !done;
}

// Runs a call on a thread of its own, which is joined at the end of the scope.
class OwnThread {
 public:
  explicit OwnThread(std::function<void()> call)
      : thread_([this, call = std::move(call)] {
          id_ = ::gettid();
          call();
          done_ = true;
        }) {}
  ~OwnThread() { thread_.join(); }
  OwnThread(const OwnThread &) = delete;
  OwnThread &operator=(const OwnThread &) = delete;
  // Until it sleeps in the call (true) or has returned.
  bool waits() const {
    while (id_ == 0) std::this_thread::yield();
    return await_asleep(id_, done_);
  }
  // Until it has returned (true), or for a minute.
  bool returns() const {
    using namespace std::chrono_literals;
    const auto last = std::chrono::steady_clock::now() + 60s;
    while (!done_ && std::chrono::steady_clock::now() < last) std::this_thread::sleep_for(1ms);
    return done_;
  }

 private:
  std::atomic<pid_t> id_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Do all threads of the library of this name sleep? Those that spin do not.
inline bool all_sleep(const std::string &name) {
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string of;
    std::getline(std::ifstream(task.path() / "comm"), of);
    if (of == name && !is_asleep(task.path())) return false;
  }
  return true;
}

// How often threads of the library of this name have gone to sleep.
inline uint64_t sleeps_of(const std::string &name) {
  uint64_t sleeps = 0;
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string of, key;
    std::getline(std::ifstream(task.path() / "comm"), of);
    if (of != name) continue;
    std::ifstream status(task.path() / "status");
    while (status >> key)
      if (uint64_t count = 0; key == "voluntary_ctxt_switches:" && status >> count) sleeps += count;
  }
  return sleeps;
}

}  // namespace fsdp::test
