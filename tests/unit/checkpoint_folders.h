// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of files and folders of checkpoints on a disk and in memory.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/error.h"
#include "checkpoint/files/file.h"
#include "checkpoint/files/folder.h"
#include "system_faults.h"

namespace fsdp::checkpoint {

namespace fs = std::filesystem;
using test::FaultScope;
using test::SystemFault;
using Way = SystemFault::Way;

// Creates a folder of this test on the disk or in memory. Where tmpfs has no direct I/O, it covers the other way of
// writing.
class Files : public testing::TestWithParam<const char *> {
 protected:
  Files() {
    std::string name = std::string(GetParam()) + "/checkpoint-files-XXXXXX";
    path = ::mkdtemp(name.data());
    folder = Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ~Files() override { fs::remove_all(path); }

  std::string text_of(const std::string &name) const {
    std::ifstream file(path + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string &name, const std::string &text) const { std::ofstream(path + "/" + name) << text; }

  std::string path;
  Fd folder;
};

template <class Body>
Error error_of(Body body) {
  try {
    body();
  } catch (const Error &error) {
    return error;
  }
  return Error(FSDP_OK, "no error");
}

inline bool has(const Error &error, const std::string &text) {
  if (error.message.find(text) != std::string::npos) return true;
  std::printf("# '%s' lacks '%s'\n", error.message.c_str(), text.c_str());
  return false;
}

inline std::string random_text(size_t size) {
  std::minstd_rand random(static_cast<uint32_t>(size));
  std::string text(size, '\0');
  for (char &c : text) c = static_cast<char>(random() >> 8);
  return text;
}

inline void write_file(int folder, const std::string &name, const std::string &shown, const std::string &text) {
  const AlignedBytes buffer(text.size());
  std::memcpy(buffer.bytes().data(), text.data(), text.size());
  OutFile file(folder, name, shown);
  file.write(0, buffer.bytes());
  file.finish(text.size());
}

inline Manifest manifest_of(uint64_t sequence, uint64_t step) {
  Manifest manifest;
  manifest.sequence = sequence;
  manifest.step = step;
  return manifest;
}

// Makes a checkpoint of two files, one of them in a folder.
inline void save(const std::string &path, uint64_t sequence, uint64_t step, bool replace = false, bool named = false) {
  const Folder folder = Folder::make(path);
  folder.remove_leftovers();
  NewCheckpoint checkpoint(folder, named ? step_name(step) : "");
  write_file(checkpoint.fd(), "shard", checkpoint.shown("shard"), random_text(9000 + step));
  const Fd inside = checkpoint.make_folder("optimizer");
  write_file(inside.get(), "shard", checkpoint.shown("optimizer/shard"), random_text(5000 + step));
  checkpoint.commit(step_name(step), write_manifest(manifest_of(sequence, step)), replace);
}

// Returns the steps of all checkpoints that have a name. At any time each of them must be whole.
inline std::vector<uint64_t> whole_steps(const std::string &path) {
  std::vector<UnreadableCheckpoint> problems;
  std::vector<uint64_t> steps;
  for (const FolderEntry &entry : Folder(path).list(&problems)) {
    const uint64_t step = entry.manifest.step;
    EXPECT_EQ(entry.name, step_name(step));
    const auto text = [&](const std::string &name) {
      std::ifstream file(path + "/" + entry.name + "/" + name, std::ios::binary);
      return std::string{std::istreambuf_iterator<char>(file), {}};
    };
    EXPECT_EQ(text("shard"), random_text(9000 + step));
    EXPECT_EQ(text("optimizer/shard"), random_text(5000 + step));
    steps.push_back(step);
  }
  EXPECT_TRUE(problems.empty()) << problems[0].why.message;
  return steps;
}

inline size_t entries(const std::string &path) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(path), fs::directory_iterator{}));
}

}  // namespace fsdp::checkpoint
