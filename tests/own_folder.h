// SPDX-License-Identifier: Apache-2.0
// A folder of a test's own, which ends with it: what a test wants not to be there is missing in here, whatever other
// folders the machine has.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace fsdp::test {

class OwnFolder {
 public:
  OwnFolder() {
    std::string name = testing::TempDir() + "fsdp-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~OwnFolder() { std::filesystem::remove_all(path_); }
  OwnFolder(const OwnFolder &) = delete;
  OwnFolder &operator=(const OwnFolder &) = delete;
  std::string operator/(const std::string &name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace fsdp::test
