// SPDX-License-Identifier: Apache-2.0
#include "membership/join/host.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "base/failure.h"
#include "membership/job.h"
#include "membership/join/guest.h"
#include "membership/join/rank_links.h"
#include "membership/join/roster.h"
#include "membership/liveness/control.h"
#include "membership/verdict.h"

namespace fsdp::membership {
namespace {

using namespace std::chrono_literals;

constexpr auto bind_time = 5s;  // time for another job that is forming to free the name

void send_refused(const Fd &socket, fsdp_status status, int32_t rank, const std::string &text) {
  const auto refused = wire::make_refused(status, rank, text);
  send_packet(socket, &refused, sizeof refused);
}

void send_verdict(const Fd &socket, const Verdict &verdict) {
  auto packet = wire::make<wire::VerdictPacket>();
  packet.verdict = verdict;
  send_packet(socket, &packet, sizeof packet);
}

bool ready(const Fd &file) {
  pollfd entry{file.get(), POLLIN, 0};
  return file && ::poll(&entry, 1, 0) > 0;
}

}  // namespace

Host::Host(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter)
    : options_(options),
      ranks_(ranks),
      waiter_(waiter),
      deadline_(Clock::now() + std::chrono::milliseconds(options.timeout_ms)),
      refusals_("a connection to the ranks of this host", options.log),
      known_refusals_("a process of this host", options.log),
      seats_(options.size) {
  for (const uint32_t r : ranks_) seats_[r].expected = true;
  seats_[ranks_[0]].taken = true;
}

Rendezvous Host::run() {
  listen();
  try {
    check_kernel();
    descriptors_ = make_descriptors();
    control_ = Control::create(options_.size, ranks_here(ranks_));
    while (joined_ < ranks_.size()) {
      look_around();
      check_joined();
      check_limits();
      waiter_.poll();
    }
    acceptor_.reset();
    listener_.reset();
    guests_.clear();
    start_all();
  } catch (const Error &error) {
    cancel(error);
  }
  std::vector<PeerDescriptors> peers;
  for (const uint32_t r : ranks_.subspan(1)) peers.push_back(std::move(seats_[r].descriptors));
  auto links = std::make_unique<ProcessLinks>(ranks_[0], std::move(descriptors_.inbox), std::move(peers));
  return {std::move(control_), std::move(links), {}, {}, {}};
}

void Host::listen() {
  const auto last_try = std::min(deadline_, Clock::now() + bind_time);
  const Address address(options_);
  for (;;) {
    listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_) fail_errno(errno, "the socket of the rendezvous");
    if (::bind(listener_.get(), address.get(), address.length()) == 0) break;
    if (errno != EADDRINUSE) fail_errno(errno, format_text("listening at the rendezvous '{}'", options_.rendezvous));
    if (Clock::now() >= last_try)
      throw Error(
          FSDP_INVALID_ARGUMENT,
          format_text("rank {0} cannot listen at the rendezvous '{1}': another process does; is there a second rank "
                      "{0}, or another job of the same rendezvous?",
                      ranks_[0], options_.rendezvous),
          static_cast<int32_t>(ranks_[0]), FSDP_ORIGIN_OS, EADDRINUSE);
    waiter_.poll();
    ::usleep(slice_ms * 1000);
  }
  acceptor_.emplace(options_.secret, "", &refusals_);
  if (::listen(listener_.get(), SOMAXCONN) != 0) fail_errno(errno, "listening at the rendezvous");
  acceptor_->listen(listener_);
}

// Sleeps until there is something to read, and then reads all connections.
void Host::look_around() {
  std::vector<pollfd> polls;
  acceptor_->add_polls(polls);
  for (const Guest &guest : guests_) polls.push_back({guest.socket.get(), POLLIN, 0});
  for (const ExpectedRank &seat : seats_)
    if (seat.descriptors.process && !end_) polls.push_back({seat.descriptors.process.get(), POLLIN, 0});
  ::poll(polls.data(), polls.size(), slice_ms);
  for (Acceptor::AuthenticatedSocket &arrival : acceptor_->look())
    guests_.push_back({std::move(arrival.socket), Clock::now() + Acceptor::message_time});
  for (Guest &guest : guests_) hear(guest);
  const auto now = Clock::now();
  std::erase_if(guests_, [&](const Guest &guest) { return !guest.socket || now >= guest.deadline; });
}

// An unexpected packet ends the connection. If it came from a rank of this job, that rank tries again.
void Host::hear(Guest &guest) {
  auto packet = receive_packet(guest.socket);
  if (!packet) return;
  if (packet->as<wire::JoinPacket>()) join(guest, *packet);
  guest.socket.reset();
  if (const auto said = packet->as<wire::ReportPacket>()) obey(said->report);
}

// Called when a rank reports that it cannot join. The job cannot form without that rank, so the forming ends here.
void Host::obey(const Report &report) {
  const auto rank = static_cast<uint32_t>(report.last_of);
  if (end_ || rank >= options_.size || !seats_[rank].expected || seats_[rank].taken) return;
  if (!is_believable(report.accusation, options_.size)) return;
  ++told_;  // that rank knows the verdict already
  throw error_of(report.accusation, ranks_[0]);
}

void Host::join(Guest &guest, Packet &packet) {
  const auto join = *packet.as<wire::JoinPacket>();
  const auto refuse = [&](fsdp_status status, const std::string &text) {
    known_refusals_.note({}, text);
    send_refused(guest.socket, status, static_cast<int32_t>(join.rank), text);
  };
  if (const auto difference = compare_versions(join.rank, join.wire_version, join.library.copy(), ranks_[0]);
      !difference.empty())
    return refuse(FSDP_MISMATCH, difference);
  if (join.world_size != options_.size)
    return refuse(FSDP_MISMATCH, format_text("rank {} says that the world has {} ranks, rank {} says {}", join.rank,
                                             join.world_size, ranks_[0], options_.size));
  if (join.rank >= options_.size)
    return refuse(FSDP_INVALID_ARGUMENT, format_text("rank {} is outside [0, {})", join.rank, options_.size));
  if (!seats_[join.rank].expected)
    return refuse(FSDP_INVALID_ARGUMENT, format_text("rank {} is not of this host", join.rank));
  if (seats_[join.rank].taken)
    return refuse(FSDP_INVALID_ARGUMENT, format_text("another process is rank {} already", join.rank));
  if (end_) {
    ++told_;
    return send_verdict(guest.socket, *end_);
  }
  if (packet.file_count != 2)
    return refuse(FSDP_SYSTEM, format_text("rank {}: {} of 2 descriptors came through (see ulimit -n)", join.rank,
                                           packet.file_count));
  ExpectedRank &seat = seats_[join.rank];
  seat.descriptors = {join.rank, std::move(packet.files[0]), std::move(packet.files[1])};
  seat.connection = std::move(guest.socket);
  seat.taken = true;
  ++joined_;
}

// Finds ranks that have ended after they joined, because all others would wait for them. A joined rank sends nothing
// before the start, so a readable connection has also ended.
void Host::check_joined() {
  std::vector<uint32_t> dead;
  for (const uint32_t r : ranks_)
    if (ready(seats_[r].descriptors.process)) dead.push_back(r);
  if (!dead.empty())
    fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(dead.front()), "{} died before the job had formed",
              rank_list(dead));
  for (const uint32_t r : ranks_)
    if (ready(seats_[r].connection)) lose(r);
}

// Called when the connection of this rank has ended: its process has died, or the rank gave up. The connection of a
// killed process closes before the process's pidfd shows its end, on a busy machine much earlier.
void Host::lose(uint32_t rank) const {
  for (int looks = 0; looks < 300 && !ready(seats_[rank].descriptors.process); ++looks) ::usleep(1000);
  fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(rank), "rank {} {} before the job had formed", rank,
            ready(seats_[rank].descriptors.process) ? "died" : "gave up");
}

std::vector<uint32_t> Host::missing() const {
  std::vector<uint32_t> ranks;
  for (const uint32_t r : ranks_)
    if (!seats_[r].taken) ranks.push_back(r);
  return ranks;
}

void Host::check_limits() {
  if (joined_ == ranks_.size()) return;
  const std::vector<uint32_t> ranks = missing();
  const std::string problem = acceptor_->pause().problem();
  if (acceptor_->pause().lasts(Acceptor::shortage_time))
    fail(FSDP_SYSTEM, "rank {} cannot take the connections of {}: {}", ranks_[0], rank_list(ranks), problem);
  if (Clock::now() < deadline_) return;
  fail_rank(FSDP_TIMEOUT, static_cast<int32_t>(ranks.front()),
            "{} {} not come to the rendezvous '{}' within {} ms (in rank {}'s network namespace, {}){}{}",
            rank_list(ranks), ranks.size() == 1 ? "has" : "have", options_.rendezvous, options_.timeout_ms, ranks_[0],
            network_namespace(), problem.empty() ? "" : "; more connections could not be taken: ", problem);
}

// Sends the verdict to all ranks that have joined, and to those that arrive within a short time.
void Host::cancel(const Error &error) {
  const Error settled = waiter_.settle(error);
  end_ = Verdict{accusation_of(settled, ranks_[0])};
  for (const ExpectedRank &seat : seats_)
    if (seat.connection) send_verdict(seat.connection, *end_);
  for (Guest &guest : guests_) {  // guests were about to join
    if (!guest.socket) continue;
    const Error end = error_of(end_->accusation, RankSet::most);
    send_refused(guest.socket, end.status, end.rank, end.message);  // its library may be of another version
    guest.socket.reset();
    ++told_;
  }
  say_farewell();
  throw settled;
}

// Only for a job on one host: ranks of several hosts get the verdict from the TCP rendezvous.
void Host::say_farewell() noexcept {
  if (!acceptor_ || ranks_.size() < options_.size) return;
  try {
    const auto end = Clock::now() + std::chrono::milliseconds(options_.farewell_ms);
    const size_t count = missing().size();
    while (Clock::now() < end && told_ < count) look_around();
  } catch (...) {  // no memory: late ranks will not find this rank
  }
}

void Host::start_all() {
  for (const uint32_t to : ranks_.subspan(1)) {
    for (const uint32_t r : ranks_) {
      auto peer = wire::make<wire::PeerPacket>();
      peer.rank = r;
      peer.world_size = options_.size;
      const PeerDescriptors &descriptors = seats_[r].descriptors;
      const int files[] = {r == ranks_[0] ? descriptors_.process.get() : descriptors.process.get(),
                           r == ranks_[0] ? descriptors_.outbox.get() : descriptors.outbox.get()};
      if (r != to) send_all(to, &peer, sizeof peer, files);
    }
    const auto start = wire::make<wire::StartPacket>();
    const int files[] = {control_.get()};
    send_all(to, &start, sizeof start, files);
  }
}

void Host::send_all(uint32_t to, const void *message, size_t bytes, std::span<const int> files) {
  for (;;) {
    const Sent sent = send_packet(seats_[to].connection, message, bytes, files);
    if (sent == Sent::yes) return;
    if (sent == Sent::broken) lose(to);
    if (Clock::now() >= deadline_)
      fail_rank(FSDP_TIMEOUT, static_cast<int32_t>(to), "rank {} does not read what rank {} sends", to, ranks_[0]);
    waiter_.poll();
    await_room(seats_[to].connection, slice_ms);
  }
}

}  // namespace fsdp::membership
