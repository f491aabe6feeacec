// SPDX-License-Identifier: Apache-2.0
// What fsdp-ckpt does once its command line is read. Each returns the status to exit with, and throws what went wrong.
#pragma once

#include <cstdint>
#include <string>

namespace ckpt {

struct Request {
  std::string source;  // a folder of checkpoints, a checkpoint, or weights to import
  std::string target;
  std::string renames;      // file; empty: none
  std::string dtype;        // empty: as it is
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
