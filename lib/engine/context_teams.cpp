// SPDX-License-Identifier: Apache-2.0
// The ranks of a context's job: teams of some of them, and what all of them exchange.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "engine/context.h"
#include "trace/span.h"
#include "transport/net.h"

namespace fsdp::engine {
namespace {

// A NaN of any rank stays one: "did anybody diverge" must have one answer.
double combine(fsdp_value_op op, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (op == FSDP_VALUE_SUM || op == FSDP_VALUE_MEAN) return a + b;
  return op == FSDP_VALUE_MIN ? std::min(a, b) : std::max(a, b);
}

}  // namespace

std::unique_ptr<transport::Team> Context::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  return world_->create_team(ranks, what);
}

transport::DeviceTransport Context::transport() const noexcept {
  if (device_traits().host_memory) return transport::DeviceTransport::none;
  switch (options_.device_transport) {
    case FSDP_TRANSPORT_NCCL: return transport::DeviceTransport::nccl;
    case FSDP_TRANSPORT_STAGING: return transport::DeviceTransport::staging;
    default: return transport::DeviceTransport::automatic;
  }
}

std::shared_ptr<transport::Team> Context::create_device_team(std::shared_ptr<transport::Team> team,
                                                             transport::DeviceTransport transport) {
  auto made = transport::create_device_team(std::move(team), *device_, transport, waiter_, failure_);
  for (const transport::Note &note : made->notes()) log(note.level, note.text);
  return made;
}

uint64_t Context::message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  return world_ ? world_->message_bytes(ranks, sums) : planned_message_bytes(ranks, sums);
}

uint64_t Context::planned_message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  const auto count = static_cast<uint32_t>(ranks.size());
  const std::vector<uint32_t> hosts = hosts_of(ranks);
  if (std::count(hosts.begin(), hosts.end(), hosts[0]) == count) return transport::message_staging_bytes(count);
  return sums ? transport::net_scratch_bytes(count, transport::read_net_chunk_bytes()) : 0;
}

std::vector<uint32_t> Context::hosts_of(std::span<const uint32_t> ranks) const {
  const uint32_t pretended = options_.ranks_per_host;
  std::vector<uint32_t> hosts;
  for (const uint32_t rank : ranks) {
    const uint32_t host = world_ ? world_->host_of(rank) : 0;
    if (pretended && host)
      fail(FSDP_INVALID_ARGUMENT,
           "fsdp_context_options.ranks_per_host is {}, but rank {} is on another host than rank 0 already", pretended,
           rank);
    hosts.push_back(pretended ? rank / pretended : host);
  }
  return hosts;
}

const std::vector<uint32_t> &Context::world_ranks() {
  if (world_ranks_.empty()) {
    world_ranks_.resize(world_size_);
    std::iota(world_ranks_.begin(), world_ranks_.end(), 0u);
  }
  return world_ranks_;
}

Context::ValueTeam &Context::value_team(const std::vector<uint32_t> &ranks) {
  if (const auto known = value_teams_.find(ranks); known != value_teams_.end()) return known->second;
  ValueTeam made;
  made.messages.resize(ranks.size() + 1);
  made.team = create_team(ranks, ranks.size() == world_size_ ? "the world" : "values of a mesh");
  return value_teams_.emplace(ranks, std::move(made)).first->second;
}

void Context::wait_for_ranks(const char *what, const std::function<void()> &tell) {
  const trace::Span wait(timeline(), trace::EventKind::wait, "wait for peers");
  const trace::FlightScope exchange(value_flights_, what, 0);
  flight_.begin_wait("wait for peers", nullptr, trace::now_ns());
  tell();
  flight_.end_wait(trace::now_ns());  // of one that failed, what it was for is kept
}

// The header goes with the values, so that ranks that disagree find out before anything is done with them.
std::span<const Context::ValueMessage> Context::exchange_values(const layout::Mesh *mesh, const double *values,
                                                                uint64_t count, fsdp_value_op op, const char *call) {
  require_world(call);
  if (closed_) fail(FSDP_INVALID_STATE, "{}: rank {} has closed this context; destroy it", call, rank_);
  const trace::Span span(timeline(), trace::EventKind::call, "all_reduce_values", nullptr, 0, count * sizeof *values);
  const std::vector<uint32_t> &ranks = mesh ? mesh->ranks : world_ranks();
  auto &[team, messages] = value_team(ranks);
  ValueMessage &mine = messages.back();
  mine.count = count;
  mine.op = op;
  std::copy_n(values, count, mine.values);
  const auto tell = [&mine, &ranks = *team, &all = messages, call] {
    ranks.all_gather(&mine, sizeof mine, all.data(), call);
  };
  wait_for_ranks(call, std::cref(tell));  // a function object of its own would lie on the heap, in every step
  // The first rank is what others are measured by, so that all ranks say the same.
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

void Context::all_reduce(const layout::Mesh *mesh, double *values, uint64_t count, fsdp_value_op op, const char *call) {
  const auto told = exchange_values(mesh, values, count, op, call);
  for (uint64_t i = 0; i < count; ++i) {
    double result = told[0].values[i];
    for (size_t r = 1; r < told.size(); ++r) result = combine(op, result, told[r].values[i]);
    values[i] = op == FSDP_VALUE_MEAN ? result / static_cast<double>(told.size()) : result;
  }
}

}  // namespace fsdp::engine
