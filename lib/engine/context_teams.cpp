// SPDX-License-Identifier: Apache-2.0
// The ranks of a context's job: teams of some of them, and what all of them exchange.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "comm/net.h"
#include "engine/context.h"
#include "trace/span.h"

namespace fsdp::engine {
namespace {

// A NaN of any rank stays one: "did anybody diverge" must have one answer.
double combine(fsdp_value_op op, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (op == FSDP_VALUE_SUM) return a + b;
  return op == FSDP_VALUE_MIN ? std::min(a, b) : std::max(a, b);
}

}  // namespace

std::unique_ptr<comm::Team> Context::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  return world_->create_team(ranks, what);
}

comm::DeviceTransport Context::transport() const noexcept {
  switch (options_.device_transport) {
    case FSDP_TRANSPORT_NCCL: return comm::DeviceTransport::nccl;
    case FSDP_TRANSPORT_STAGING: return comm::DeviceTransport::staging;
    default: return comm::DeviceTransport::automatic;
  }
}

std::shared_ptr<comm::Team> Context::create_device_team(std::shared_ptr<comm::Team> team, comm::DeviceTransport transport) {
  auto made = comm::create_device_team(std::move(team), *device_, transport, waiter_, failure_);
  for (const comm::Note &note : made->notes()) log(note.level, note.text);
  return made;
}

uint64_t Context::message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  if (world_) return world_->message_bytes(ranks, sums);
  const auto count = static_cast<uint32_t>(ranks.size());
  const std::vector<uint32_t> hosts = hosts_of(ranks);
  if (std::count(hosts.begin(), hosts.end(), hosts[0]) == count) return comm::message_staging_bytes(count);
  return sums ? comm::net_scratch_bytes(count, comm::read_net_chunk_bytes()) : 0;
}

std::vector<uint32_t> Context::hosts_of(std::span<const uint32_t> ranks) const {
  const uint32_t pretended = options_.ranks_per_host;
  std::vector<uint32_t> hosts;
  for (const uint32_t rank : ranks) {
    const uint32_t host = world_ ? world_->host_of(rank) : 0;
    if (pretended && host)
      fail(FSDP_INVALID_ARGUMENT, "fsdp_context_options.ranks_per_host is {}, but rank {} is on another host than rank 0 already",
           pretended, rank);
    hosts.push_back(pretended ? rank / pretended : host);
  }
  return hosts;
}

comm::Team &Context::world_team() {
  if (!world_team_) {
    value_messages_.resize(world_size_ + 1);
    std::vector<uint32_t> ranks(world_size_);
    std::iota(ranks.begin(), ranks.end(), 0u);
    world_team_ = create_team(ranks, "the world");
  }
  return *world_team_;
}

void Context::exchange_with_world(const void *mine, uint64_t bytes, void *all, const char *what) {
  comm::Team &team = world_team();
  const trace::Span wait(timeline(), trace::Kind::wait, "wait for peers");
  const trace::FlightScope exchange(value_flights_, what, 0);
  flight_.begin_wait("wait for peers", nullptr, trace::now_ns());
  team.exchange_fixed(mine, bytes, all, what);
  flight_.end_wait(trace::now_ns());  // of one that failed, what it was for is kept
}

// The header goes with the values, so that ranks that disagree find out before anything is added.
void Context::all_reduce(double *values, uint64_t count, fsdp_value_op op) {
  require_world("fsdp_all_reduce_values");
  if (closed_) fail(FSDP_INVALID_STATE, "fsdp_all_reduce_values: rank {} has closed this context; destroy it", rank_);
  const trace::Span call(timeline(), trace::Kind::call, "all_reduce_values", nullptr, 0, count * sizeof *values);
  world_team();  // and the messages
  ValueMessage &mine = value_messages_[world_size_];
  mine.count = count;
  mine.op = op;
  std::copy_n(values, count, mine.values);
  exchange_with_world(&mine, sizeof mine, value_messages_.data(), "fsdp_all_reduce_values");
  for (uint32_t r = 0; r < world_size_; ++r) {
    const ValueMessage &other = value_messages_[r];
    if (other.count != count || other.op != op)
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(r),
                "fsdp_all_reduce_values: rank {} reduces {} values with op {}, rank {} reduces {} with op {}", r,
                other.count, other.op, rank_, count, op);
  }
  for (uint64_t i = 0; i < count; ++i) {
    double result = value_messages_[0].values[i];
    for (uint32_t r = 1; r < world_size_; ++r) result = combine(op, result, value_messages_[r].values[i]);
    values[i] = result;
  }
}

}  // namespace fsdp::engine
