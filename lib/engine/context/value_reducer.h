// SPDX-License-Identifier: Apache-2.0
// Reduces or exchanges a few values over ranks of a context, on the calling thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "fsdp.h"
#include "trace/flight.h"
#include "transport/team.h"

namespace fsdp::engine {

class Context;

class ValueReducer {
 public:
  static constexpr uint64_t max_values = 512;  // limit of values in one call
  // A rank's message in one call.
  struct ValueMessage {
    uint64_t count = 0;
    int64_t op = 0;
    double values[max_values] = {};
  };

  ValueReducer(Context &context, trace::FlightRecorder &flight)
      : context_(context), flights_(flight, trace::Sequence::values) {}
  ValueReducer(const ValueReducer &) = delete;
  ValueReducer &operator=(const ValueReducer &) = delete;

  // Reduces over these ranks of the job, in this order.
  void all_reduce(const std::vector<uint32_t> &ranks, double *values, uint64_t count, fsdp_value_op op,
                  const char *call);
  // Returns the values of these ranks, rank by rank; they are valid until the next such call. Ranks compare `op`; 0:
  // the values are not reduced.
  std::span<const ValueMessage> exchange(const std::vector<uint32_t> &ranks, const double *values, uint64_t count,
                                         fsdp_value_op op, const char *call);
  void barrier(const std::vector<uint32_t> &ranks, const char *call);
  // The team of these ranks. The first call for these ranks is collective.
  transport::Team &team(const std::vector<uint32_t> &ranks) { return *find(ranks).team; }
  // Destroys the teams, which must end before their world.
  void clear() noexcept { teams_.clear(); }

 private:
  struct ValueTeam {
    std::unique_ptr<transport::Team> team;
    std::vector<ValueMessage> messages;  // one per rank, and this rank's own at the end
  };
  ValueTeam &find(const std::vector<uint32_t> &ranks);
  // Runs an exchange with other ranks, and counts and records the wait.
  void wait_for_ranks(const char *what, const std::function<void()> &tell);

  Context &context_;
  trace::FlightSequence flights_;
  std::map<std::vector<uint32_t>, ValueTeam> teams_;  // key: the ranks, in their order
};

}  // namespace fsdp::engine
