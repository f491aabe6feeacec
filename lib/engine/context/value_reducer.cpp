// SPDX-License-Identifier: Apache-2.0
#include "engine/context/value_reducer.h"

#include <algorithm>
#include <cmath>

#include "engine/context/context.h"
#include "trace/timeline.h"

namespace fsdp::engine {
namespace {

// Combines two values. The result is NaN if either value is NaN, so all ranks see that one rank diverged.
double combine(fsdp_value_op op, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (op == FSDP_VALUE_SUM || op == FSDP_VALUE_MEAN) return a + b;
  return op == FSDP_VALUE_MIN ? std::min(a, b) : std::max(a, b);
}

}  // namespace

ValueReducer::ValueTeam &ValueReducer::find(const std::vector<uint32_t> &ranks) {
  if (const auto known = teams_.find(ranks); known != teams_.end()) return known->second;
  ValueTeam made;
  made.messages.resize(ranks.size() + 1);
  const bool is_world = ranks.size() == context_.world_size();
  made.team = context_.create_team(ranks, is_world ? "the world" : "values of a mesh");
  return teams_.emplace(ranks, std::move(made)).first->second;
}

void ValueReducer::wait_for_ranks(const char *what, const std::function<void()> &tell) {
  trace::FlightRecorder &flight = context_.flight();
  const trace::Span wait(context_.timeline(), trace::EventKind::wait, "wait for peers");
  const trace::FlightScope exchange(flights_, what, 0);
  flight.begin_wait("wait for peers", nullptr, trace::now_ns());
  tell();
  flight.end_wait(trace::now_ns());  // after a failed wait, the recorder keeps the reason of the wait
}

void ValueReducer::barrier(const std::vector<uint32_t> &ranks, const char *call) {
  transport::Team &all = team(ranks);
  wait_for_ranks(call, [&] { all.barrier(call); });
}

// The header is sent with the values, so that ranks find a difference before they use any value.
std::span<const ValueReducer::ValueMessage> ValueReducer::exchange(const std::vector<uint32_t> &ranks,
                                                                   const double *values, uint64_t count,
                                                                   fsdp_value_op op, const char *call) {
  const trace::Span span(context_.timeline(), trace::EventKind::call, "all_reduce_values", nullptr, 0,
                         count * sizeof *values);
  auto &[team, messages] = find(ranks);
  ValueMessage &mine = messages.back();
  mine.count = count;
  mine.op = op;
  std::copy_n(values, count, mine.values);
  const auto tell = [&mine, &ranks = *team, &all = messages, call] {
    ranks.all_gather(&mine, sizeof mine, all.data(), call);
  };
  wait_for_ranks(call, std::cref(tell));  // std::cref: a copy of the function object would be allocated in every step
  // Every rank compares all ranks with the first one, so all ranks report the same difference.
  const ValueMessage &first = messages[0];
  for (size_t r = 1; r < ranks.size(); ++r) {
    const ValueMessage &other = messages[r];
    if (other.count != first.count || other.op != first.op)
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(ranks[r]),
                "{}: rank {} reduces {} values with op {}, rank {} reduces {} with op {}", call, ranks[r], other.count,
                other.op, ranks[0], first.count, first.op);
  }
  return std::span(messages).first(ranks.size());
}

void ValueReducer::all_reduce(const std::vector<uint32_t> &ranks, double *values, uint64_t count, fsdp_value_op op,
                              const char *call) {
  const auto told = exchange(ranks, values, count, op, call);
  for (uint64_t i = 0; i < count; ++i) {
    double result = told[0].values[i];
    for (size_t r = 1; r < told.size(); ++r) result = combine(op, result, told[r].values[i]);
    values[i] = op == FSDP_VALUE_MEAN ? result / static_cast<double>(told.size()) : result;
  }
}

}  // namespace fsdp::engine
