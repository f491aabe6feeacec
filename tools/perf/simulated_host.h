// SPDX-License-Identifier: Apache-2.0
// One host of `join`: a process in which the host's leader is a rank of the job, and stands in for the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace perf {

constexpr uint32_t max_simulated_hosts = 4096;

// What the parent tells all hosts; each waits for the number to grow.
enum class Order : uint32_t { none, join, close };

struct JoinReport {
  enum State : uint32_t { forked, joined, named, closed, failed };
  std::atomic<uint32_t> state;
  double join_seconds, agree_seconds, gather_seconds, close_seconds;
  uint64_t bytes;        // private to the process, more than before it joined
  uint32_t connections;  // sockets of its process, once all have joined
  int32_t named_rank;    // the rank that the error of this host names
  double named_at;       // the time of that error, by now()
  char text[320];
};

// Lies in memory that all share, made before the hosts are.
struct JoinMemory {
  std::atomic<uint32_t> order;
  std::atomic<uint32_t> arrived;
  JoinReport hosts[max_simulated_hosts];  // the first ones are used, one for each host
};

struct SimulatedHost {
  uint32_t host = 0, hosts = 0, ranks_per_host = 1;
  std::string rendezvous;

  uint32_t leader() const { return host * ranks_per_host; }
};

// Runs until the order to close, or until the job has failed. Returns the exit status.
int live(const SimulatedHost &host, JoinMemory &memory);

// Waits on a word in shared memory, or wakes the process that waits.
void await_order(JoinMemory &memory, Order order);
void give_order(JoinMemory &memory, Order order);

}  // namespace perf
