// SPDX-License-Identifier: Apache-2.0
// Counts the threads, descriptors and mappings of this process. The counts are compared before and after a job.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

namespace network {

struct Levels {
  size_t threads = 0, mappings = 0;
  std::vector<std::string> files;
};

inline Levels count_levels() {
  namespace fs = std::filesystem;
  Levels levels;
  for (const auto &task : fs::directory_iterator("/proc/self/task")) levels.threads += !task.path().empty();
  std::error_code gone;  // the list always contains the descriptor of this loop
  for (const auto &file : fs::directory_iterator("/proc/self/fd")) {
    const std::string name = fs::read_symlink(file.path(), gone).string();
    levels.files.push_back(name.substr(0, name.find(':')));
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++levels.mappings;
  return levels;
}

// A joined thread disappears from /proc a moment later.
inline Levels settled_levels() {
  Levels levels = count_levels();
  for (int tries = 0; tries < 500 && levels.threads > 1; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    levels = count_levels();
  }
  return levels;
}

inline nlohmann::json to_json(const Levels &levels) {
  return {{"threads", levels.threads}, {"mappings", levels.mappings}, {"files", levels.files}};
}

}  // namespace network
