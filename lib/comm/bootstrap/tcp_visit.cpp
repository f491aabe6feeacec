// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/tcp_visit.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "comm/bootstrap/packet.h"
#include "comm/bootstrap/version.h"

namespace fsdp::comm {
namespace {

using namespace std::chrono_literals;
constexpr auto connect_time = 3s;  // for one try
constexpr auto proof_time = 15s;   // of one try: strangers may have to make room first
constexpr auto tcp_patience = 1s;  // beyond the timeout, for rank 0 to say who is missing
constexpr useconds_t pause_us = 50'000;

}  // namespace

TcpVisit::TcpVisit(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                   const MakeCard &make_card)
    : options_(options),
      point_(point),
      waiter_(waiter),
      make_card_(make_card),
      deadline_(Clock::now() + std::chrono::milliseconds(options.timeout_ms)),
      last_problem_("nobody listens there") {}

Assembly TcpVisit::run() {
  for (;;) {
    for (const Endpoint &place : places())
      if (auto assembly = visit(place)) return std::move(*assembly);
    if (Clock::now() >= deadline_) give_up();
    waiter_.poll();
    ::usleep(pause_us);
  }
}

void TcpVisit::give_up() const {
  fail_rank(FSDP_TIMEOUT, 0, "rank {} has not found rank 0 at the rendezvous '{}' within {} ms: {}", options_.rank,
            options_.rendezvous, options_.timeout_ms, last_problem_);
}

// Asked again at each try: a name may become known, and the file be replaced.
std::vector<Endpoint> TcpVisit::places() {
  std::string problem;
  auto found = point_.kind == MeetingPoint::Kind::tcp
                   ? names_.find(point_.host, point_.port, {deadline_, waiter_}, problem)
                   : read_notice(notice_path(point_, options_), problem);
  if (found.empty()) last_problem_ = problem;
  for (const Endpoint &place : found) check_guarded(place, options_);  // whoever may write the file, too
  return found;
}

std::optional<Assembly> TcpVisit::visit(const Endpoint &place) {
  if (!connect(place)) return {};
  try {
    join();
    return await_start();
  } catch (const Error &error) {
    report(error);
    throw;
  }
}

// Else rank 0 would take this rank for dead.
void TcpVisit::report(const Error &error) noexcept {
  try {
    if (!stream_.speaks()) return;
    stream_.queue(message::share(report_of(error, options_.rank)));
    stream_.flush();
  } catch (...) {  // no memory: then it looks like a death
  }
}

bool TcpVisit::connect(const Endpoint &place) {
  std::string problem;
  Fd socket = connect_to(place, limit(connect_time), problem);
  if (!socket) {
    // At the deadline it only says that time is over: a refusal before says more.
    if (!refused_ || Clock::now() < deadline_) last_problem_ = problem;
    return false;
  }
  StreamKeys keys;
  problem = prove(socket, Role::guest, options_.secret, rendezvous_label(options_), limit(proof_time), &keys);
  stream_ = FrameStream(std::move(socket), message::longest, keys);
  if (problem.empty()) return true;
  refused_ = true;
  last_problem_ = format_text("{}: {}", place.text(), problem);
  return false;
}

// Who this rank is comes first: making its card takes a while, and rank 0 then knows whose end it sees.
void TcpVisit::join() {
  notice_silence(stream_.socket(), options_.heartbeat_timeout_ms);
  stream_.queue(message::share(message::Hello{wire_version, options_.rank, library_version}));
  say(message::Join{options_.rank, options_.size, options_.attempt,
                    options_.host_id.empty() ? host_identity() : options_.host_id, host_name()});
  if (!card_) card_ = message::Card{card_of(make_card_, Endpoint::local(stream_.socket()).address())};
  say(*card_);
}

// If rank 0 does not take it, it has ended, or said why not: both are heard next.
void TcpVisit::say(const message::Message &message) {
  stream_.queue(message::share(message));
  const Limit until = limit(proof_time);
  while (!stream_.flush() && stream_.open() && !until.over()) {
    waiter_.poll();
    await_room(stream_.socket(), 20);
  }
}

// Rank 0's verdict, or nothing if it asks to come again.
void TcpVisit::obey(const message::Refusal &refusal) {
  if (refusal.status != FSDP_OK) throw Error(refusal.status, refusal.text, refusal.rank);
  last_problem_ = refusal.text;
}

// Hosts are numbered in the order of their lowest ranks.
bool TcpVisit::take(const message::Entries &entries, Assembly &assembly) {
  auto &members = assembly.roster.members;
  for (const message::Entry &entry : entries.list) {
    if (entry.rank != members.size() || entry.rank >= options_.size) return false;
    if (entry.node > node_count_) return false;
    node_count_ = std::max(node_count_, entry.node + 1);
    members.push_back({entry.node, entry.host, entry.card});
  }
  return true;
}

std::optional<Assembly> TcpVisit::await_start() {
  Assembly assembly;
  node_count_ = 0;
  const Limit until{deadline_ + tcp_patience, waiter_};
  while (auto frame = stream_.receive(until)) {
    auto parsed = message::parse(frame->kind, frame->body);
    if (const auto *refusal = std::get_if<message::Refusal>(&parsed.message)) {
      obey(*refusal);
      return {};
    }
    const auto *entries = std::get_if<message::Entries>(&parsed.message);
    if (entries && take(*entries, assembly)) continue;
    const auto *start = std::get_if<message::Start>(&parsed.message);
    if (!start || start->world_size != options_.size || assembly.roster.members.size() != options_.size)
      fail_rank(FSDP_SYSTEM, 0, "rendezvous '{}': what rank 0 says is wrong: {}", options_.rendezvous,
                parsed.problem.empty() ? "a message out of turn" : parsed.problem);
    assembly.session = start->session;
    assembly.vigil = std::make_unique<GuestVigil>(options_.rank, std::move(stream_), assembly.roster.members[0].host,
                                                  deadline_, waiter_);
    return assembly;
  }
  if (stream_.open())
    fail_rank(FSDP_TIMEOUT, 0, "rendezvous '{}': rank 0 has not sent the start of the job within {} ms",
              options_.rendezvous, options_.timeout_ms);
  if (stream_.code() == EBADMSG)
    throw changed_contact(format_text("rank {} (host {})", options_.rank, host_name()), "rank 0", stream_.problem());
  if (host_is_silent(stream_.code()))
    throw lost_contact(format_text("rank {} (host {})", options_.rank, host_name()),
                       format_text("rank 0 (rendezvous {})", options_.rendezvous));
  fail_rank(FSDP_PEER_FAILED, 0, "rendezvous '{}': rank 0 ended before the job had formed ({})", options_.rendezvous,
            stream_.problem());
}

}  // namespace fsdp::comm
