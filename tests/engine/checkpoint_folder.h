// SPDX-License-Identifier: Apache-2.0
// A folder for checkpoints, the files in it, and the weights and states of a model.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "device.h"
#include "harness.h"
#include "misuse.h"

namespace harness {

namespace fs = std::filesystem;

inline constexpr const char *states[] = {"exp_avg", "exp_avg_sq"};

class Checkpoint : public testing::Test {
 protected:
  Checkpoint() {
    std::string name = "/var/tmp/checkpoint-engine-XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~Checkpoint() override { fs::remove_all(path); }

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto &entry : fs::directory_iterator(path)) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }
  std::map<std::string, std::string> files(const std::string &checkpoint) const {
    std::map<std::string, std::string> found;
    for (const auto &entry : fs::recursive_directory_iterator(path + "/" + checkpoint)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      found[fs::relative(entry.path(), path + "/" + checkpoint)].assign(std::istreambuf_iterator<char>(file), {});
    }
    return found;
  }

  std::string path;
};

inline fsdp_status save(const Rank &rank, const std::string &folder, uint64_t step = 0, uint32_t keep = 0,
                        uint32_t flags = 0) {
  fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
  options.step = step;
  options.keep = keep;
  options.flags = flags;
  return fsdp_save(rank.model, folder.c_str(), &options);
}

inline fsdp_status load(const Rank &rank, const std::string &folder, uint32_t flags = 0,
                        fsdp_loaded *loaded = nullptr) {
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags = flags;
  return fsdp_load(rank.model, folder.c_str(), &options, loaded);
}

// Weights and states of all trainable parameters, whole.
inline std::vector<std::vector<float>> everything(const Rank &rank) {
  std::vector<std::vector<float>> all = rank.read_all();
  for (size_t g = 0; g < rank.groups.size(); ++g)
    for (size_t p = 0; p < rank.def(g).params.size(); ++p)
      for (const char *state : states) {
        const ParamDef &param = rank.def(g).params[p];
        if (param.flags & FSDP_PARAM_FROZEN) continue;
        all.emplace_back(param.count());
        FSDP(fsdp_read_state(rank.groups[g], p, state, all.back().data(), FSDP_FLOAT32, param.count(), FSDP_EVERY_RANK,
                             0));
      }
  return all;
}

inline void expect_no_errors(const std::vector<std::string> &errors, const std::string &what) {
  for (const std::string &error : errors) EXPECT_EQ(error, "") << what;
}

inline void run(const Scenario &setup, const std::string &what, const std::function<void(Rank &)> &body) {
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        body(rank);
        FSDP(fsdp_close_context(context));
      },
      &errors);
  expect_no_errors(errors, what);
}

}  // namespace harness
