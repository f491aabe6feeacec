// SPDX-License-Identifier: Apache-2.0
// The threads of the library that live in this process: what a test counts to see that they end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

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

// Do all threads of the library of this name sleep? Those that spin do not.
inline bool all_sleep(const std::string &name) {
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string of, key, state;
    std::getline(std::ifstream(task.path() / "comm"), of);
    if (of != name) continue;
    std::ifstream status(task.path() / "status");
    while (key != "State:" && status >> key) {
    }
    if (!(status >> state) || state != "S") return false;
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
