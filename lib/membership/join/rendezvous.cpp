// SPDX-License-Identifier: Apache-2.0

#include "membership/join/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "membership/join/guest.h"
#include "membership/join/host.h"
#include "membership/join/tcp_host.h"
#include "membership/join/tcp_visit.h"
#include "membership/liveness/control.h"

namespace fsdp::membership {

namespace {

using Clock = std::chrono::steady_clock;

Rendezvous meet_alone(const WorldOptions &options, std::span<const uint32_t> ranks) {
  RankDescriptors descriptors = make_descriptors();
  Fd control = Control::create(options.size, ranks_here(ranks));
  auto links =
      std::make_unique<ProcessLinks>(options.rank, std::move(descriptors.inbox), std::vector<PeerDescriptors>());
  return {std::move(control), std::move(links), {}, {}, {}};
}

// The ranks of one host meet under the name in the options.
Rendezvous meet_on_host(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter) {
  if (ranks.size() == 1 || !options.stand_ins.empty()) return meet_alone(options, ranks);
  Rendezvous meeting =
      options.rank == ranks[0] ? Host(options, ranks, waiter).run() : Visit(options, ranks, waiter).run();
  check_memory_file(meeting.control, Control::size_bytes(options.size, ranks_here(ranks)), "the job's control memory");
  return meeting;
}

Rendezvous meet_by_name(const WorldOptions &options, const Waiter &waiter) {
  if (options.size > max_ranks_of_a_host)
    fail(FSDP_UNSUPPORTED, "{} ranks on one host; this release has at most {}", options.size, max_ranks_of_a_host);
  std::vector<uint32_t> ranks(options.size);
  std::iota(ranks.begin(), ranks.end(), 0);
  WorldOptions local = options;
  const WipedText wiped(local.secret);
  if (options.attempt) local.rendezvous += format_text(" (attempt {})", options.attempt);
  Rendezvous meeting = meet_on_host(local, ranks, waiter);
  const std::string host = host_name();
  for (uint32_t r = 0; r < options.size; ++r) meeting.roster.add({r, 0, host, {}});
  return meeting;
}

// The session is new for every job and attempt, so different jobs and attempts have different names.
std::string name_of_node(const Nonce &session, uint32_t node) {
  std::string name = format_text("node {} of session ", node);
  for (const uint8_t byte : session) name += format_text("{:02x}", byte);
  return name;
}

Rendezvous meet_by_network(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                           const MakeCard &make_card) {
  const auto since = Clock::now();
  Assembly assembly = options.rank == 0 ? TcpHost(options, point, waiter, make_card).run()
                                        : TcpVisit(options, point, waiter, make_card).run();
  const uint32_t node = assembly.roster.nodes()[options.rank];
  WorldOptions local = options;
  const WipedText wiped(local.secret);
  local.rendezvous = name_of_node(assembly.session, node);
  local.timeout_ms = forming_limit_ms(options, since);
  try {
    Rendezvous meeting = meet_on_host(local, assembly.roster.ranks_of(node), waiter);
    meeting.roster = std::move(assembly.roster);
    meeting.watch = std::move(assembly.watch);
    return meeting;
  } catch (const Error &error) {
    throw waiter.settle(error);
  }
}

std::string describe_hosts(const Roster &roster) {
  constexpr uint32_t max_shown = 8;
  const uint32_t count = roster.node_count();
  if (count == 1) return "one host";
  std::string text = format_text("{} hosts (", count);
  uint32_t ranks[max_shown] = {}, leaders[max_shown] = {};
  for (uint32_t r = 0; r < roster.size(); ++r)
    if (const uint32_t node = roster.nodes()[r]; node < max_shown && ranks[node]++ == 0) leaders[node] = r;
  for (uint32_t node = 0; node < std::min(count, max_shown); ++node)
    text += format_text("{}{}: {}", node ? ", " : "", roster.host_of(leaders[node]), ranks[node]);
  return text + (count > max_shown ? ", ...)" : ")");
}

const char *describe_guard(const WorldOptions &options, const MeetingPoint &point) {
  if (!options.secret.empty()) return "with a job secret";
  return point.kind == MeetingPoint::Scheme::name ? "no job secret: any process of this user could have joined"
                                                  : "no job secret: any process of this host could have joined";
}

}  // namespace

uint32_t forming_limit_ms(const WorldOptions &options, Clock::time_point since) {
  constexpr int64_t least = 500, usual = 8000;
  const auto gone = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since).count();
  const int64_t patience = std::max<int64_t>(options.heartbeat_timeout_ms, usual);
  // Other ranks wait for such a step until the whole timeout. This limit is shorter, so that the rank that takes the
  // step names the missing rank first.
  return static_cast<uint32_t>(std::clamp<int64_t>((options.timeout_ms - gone) * 3 / 4, least, patience));
}

Rendezvous meet_processes(const WorldOptions &options, const Waiter &waiter, const MakeCard &make_card) {
  const MeetingPoint point = parse_meeting_point(options.rendezvous);
  Rendezvous meeting = point.kind == MeetingPoint::Scheme::name ? meet_by_name(options, waiter)
                                                                : meet_by_network(options, point, waiter, make_card);
  meeting.description = format_text("{} ranks as processes of {}, met at rendezvous '{}' ({}{}{})", options.size,
                                    describe_hosts(meeting.roster), options.rendezvous, describe_guard(options, point),
                                    options.source.empty() ? "" : "; world from ", options.source);
  return meeting;
}

}  // namespace fsdp::membership
