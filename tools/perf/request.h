// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace perf {

// What the command line asks for.
struct Request {
  std::vector<std::string> operations;  // empty: all
  uint32_t ranks = 2;
  bool threads = false;
  bool bind = true;  // binds ranks to cores, if there are enough
  uint64_t min_bytes = 4096;
  uint64_t max_bytes = uint64_t{256} << 20;
  uint32_t factor = 4;
  uint32_t warmup = 20;  // more than the copies that the library times to choose a way
  uint32_t pairs = 25;
  bool check = false;
  std::string json_file, plot_file;
  bool mpi = false;  // measure Open MPI in the same run
  // of the model of `step`
  uint32_t depth = 24, width = 512;
  uint32_t prefetch = 1, pending = 2;
  double compute = 1.2;  // times the communication
  std::string directory = ".";  // of `save`, `load`, `step_save` and `step_home`
  // of `outer`
  std::vector<std::string> namespaces;  // of the network, one a rank; empty: this one
  std::string address = "127.0.0.1";    // rank 0's, for the raw socket
  // of `join`
  uint32_t hosts = 128, ranks_per_host = 8;

  // Sizes that ranks divide evenly are multiples of this number of bytes for each rank.
  static constexpr uint64_t bytes_per_rank = 64;

  // Each size once, also if several sizes are rounded to the same multiple of `unit`.
  std::vector<uint64_t> sizes(uint64_t unit = 1) const {
    std::vector<uint64_t> sizes;
    const auto add = [&](uint64_t bytes) {
      const uint64_t size = std::max<uint64_t>(bytes / unit, 1) * unit;
      if (sizes.empty() || sizes.back() != size) sizes.push_back(size);
    };
    for (uint64_t bytes = min_bytes; bytes <= max_bytes; bytes *= factor) add(bytes);
    add(max_bytes);
    return sizes;
  }
  std::vector<uint64_t> shared_sizes() const { return sizes(bytes_per_rank * ranks); }
};

}  // namespace perf
