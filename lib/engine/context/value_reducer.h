// SPDX-License-Identifier: Apache-2.0
// Values that ranks of a context reduce or exchange on the calling thread, a few at a time.
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
  static constexpr uint64_t max_values = 512;  // of one call
  // What a rank gives to one.
  struct ValueMessage {
    uint64_t count = 0;
    int64_t op = 0;
    double values[max_values] = {};
  };

  ValueReducer(Context &context, trace::FlightRecorder &flight)
      : context_(context), flights_(flight, trace::Sequence::values) {}
  ValueReducer(const ValueReducer &) = delete;
  ValueReducer &operator=(const ValueReducer &) = delete;

  // Over ranks of the job, in this order.
  void all_reduce(const std::vector<uint32_t> &ranks, double *values, uint64_t count, fsdp_value_op op,
                  const char *call);
  // The same ranks' values, one beside the other, until the next such call. op: compared; 0: none that adds them up.
  std::span<const ValueMessage> exchange(const std::vector<uint32_t> &ranks, const double *values, uint64_t count,
                                         fsdp_value_op op, const char *call);
  void barrier(const std::vector<uint32_t> &ranks, const char *call);
  // Collective when these ranks are first asked for.
  transport::Team &team(const std::vector<uint32_t> &ranks) { return *find(ranks).team; }
  // Teams end before their world.
  void clear() noexcept { teams_.clear(); }

 private:
  struct ValueTeam {
    std::unique_ptr<transport::Team> team;
    std::vector<ValueMessage> messages;  // one a rank, and this rank's own at the end
  };
  ValueTeam &find(const std::vector<uint32_t> &ranks);
  // What this rank tells others and hears of them is waited for and recorded.
  void wait_for_ranks(const char *what, const std::function<void()> &tell);

  Context &context_;
  trace::FlightSequence flights_;
  std::map<std::vector<uint32_t>, ValueTeam> teams_;  // by ranks, in their order
};

}  // namespace fsdp::engine
