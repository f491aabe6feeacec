// SPDX-License-Identifier: Apache-2.0
// Open MPI as a peer: one job over its shared memory transport and one over UCX, measured in turns with the library.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "perf/bench.h"
#include "perf/peer_memory.h"

namespace perf {

enum class PeerOperation : uint32_t {
  all_gather = PEER_ALL_GATHER,
  all_gather_in_place = PEER_ALL_GATHER_IN_PLACE,
  reduce_scatter = PEER_REDUCE_SCATTER,
  reduce_scatter_in_place = PEER_REDUCE_SCATTER_IN_PLACE,
  reduce_scatter_block = PEER_REDUCE_SCATTER_BLOCK,
  reduce_scatter_block_in_place = PEER_REDUCE_SCATTER_BLOCK_IN_PLACE,
  all_reduce = PEER_ALL_REDUCE,
  barrier = PEER_BARRIER
};

// A job of the peer's ranks, waiting to be asked.
class PeerJob {
 public:
  // Throws if the command cannot be started.
  PeerJob(std::string name, std::vector<std::string> command);
  ~PeerJob();  // only in the process that made it
  PeerJob(const PeerJob &) = delete;
  PeerJob &operator=(const PeerJob &) = delete;

  const std::string &name() const { return name_; }
  // Seconds of all repeats on the slowest rank. Throws if the job has ended or does not answer.
  double measure(PeerOperation operation, uint64_t bytes, uint64_t repeats, uint32_t ranks, double limit_seconds = 600);

 private:
  void tell(uint32_t operation);
  bool ended() const;

  std::string name_;
  int owner_, process_ = -1;
  fsdp::Fd file_, process_fd_;
  peer_memory *memory_ = nullptr;
};

class Peers {
 public:
  // Starts the jobs, before the ranks are made; says on stderr which one cannot be had. Throws if none can.
  explicit Peers(uint32_t ranks);

  // How often to repeat the call for a measurement of `seconds`; collective over the bench's ranks, as take().
  void prepare(Lab &lab, const PeerCall &call, double seconds);
  // One measurement of each contender, appended to samples[contender] in seconds of one run.
  void take(Lab &lab, std::vector<std::vector<double>> &samples);

 private:
  // One job and one operation that can serve the call. All contenders are timed.
  struct Contender {
    PeerJob *job;
    PeerOperation operation;
    uint64_t repeats = 1;
  };

  uint32_t ranks_;
  std::vector<std::unique_ptr<PeerJob>> jobs_;
  std::vector<Contender> contenders_;
  uint64_t bytes_ = 0;
};

}  // namespace perf
