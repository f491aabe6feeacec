// SPDX-License-Identifier: Apache-2.0
// The commands of fsdp-ckpt. Each returns the exit status, or throws the error that stopped it.
#pragma once

#include <cstdint>
#include <string>

namespace ckpt {

struct Request {
  std::string source;  // a folder of checkpoints, a checkpoint, or weights to import
  std::string target;
  std::string renames;      // a file of renames; empty: none
  std::string dtype;        // empty: dtypes stay as they are
  std::string copy_folder;  // empty: none
  uint64_t max_bytes = 5'000'000'000;
  uint64_t step = 0;
  bool json = false;
};

int list(const Request &request);
int verify(const Request &request);
int consolidate(const Request &request);
int import(const Request &request);

}  // namespace ckpt
