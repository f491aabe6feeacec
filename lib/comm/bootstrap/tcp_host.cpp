// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/tcp_host.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/bootstrap/packet.h"

namespace fsdp::comm {
namespace {

using namespace std::chrono_literals;

// Who has not joined costs no more than this; the rest waits in the kernel's queue. Where all places are taken, who has
// proven nothing for a while makes room, so that silent strangers do not keep the ranks out.
constexpr size_t most_guests = 256;
constexpr auto guest_time = 10s;
constexpr auto least_time = 500ms;
constexpr auto bind_time = 5s;  // for the listener of a job that is just forming or ending
constexpr int slice_ms = 20;

}  // namespace

TcpHost::TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                 const MakeCard &make_card)
    : options_(options),
      point_(point),
      waiter_(waiter),
      make_card_(make_card),
      deadline_(Clock::now() + std::chrono::milliseconds(options.timeout_ms)),
      label_(rendezvous_label(options)),
      seats_(options.size) {}

Assembly TcpHost::run() {
  listen();
  seats_[0].taken = true;
  seats_[0].host_id = options_.host_id.empty() ? host_identity() : options_.host_id;
  seats_[0].host = host_name();
  seats_[0].card = card_of(make_card_, at_.address());
  while (joined_ < options_.size) {
    look_around();
    check_timeout();
    waiter_.poll();
  }
  listener_.reset();
  notice_.reset();
  guests_.clear();
  Assembly assembly{make_roster(), make_nonce()};
  send_roster(assembly);
  return assembly;
}

// Tries every address of the name; errno is of the last.
Fd TcpHost::listen_somewhere() {
  std::string problem;
  std::vector<Endpoint> places;
  if (point_.kind == MeetingPoint::Kind::tcp)
    places = Endpoint::resolve(point_.host, point_.port, problem);
  else if (options_.secret.empty())
    places = Endpoint::resolve("127.0.0.1", 0, problem);
  else
    places.push_back(own_address());
  if (places.empty())
    fail(FSDP_INVALID_ARGUMENT, "rendezvous '{}': the host '{}' has no address: {}", options_.rendezvous, point_.host,
         problem);
  Fd listener;
  for (const Endpoint &place : places) {
    check_guarded(place, options_);
    if ((listener = listen_at(place, SOMAXCONN))) break;
  }
  return listener;
}

void TcpHost::listen() {
  const auto last_try = std::min(deadline_, Clock::now() + bind_time);
  while (!(listener_ = listen_somewhere())) {
    const int code = errno;
    if (code == EADDRNOTAVAIL)
      fail(FSDP_INVALID_ARGUMENT,
           "rank 0 cannot listen at the rendezvous '{}': no interface of {} has this address; it must be that of the "
           "host of rank 0",
           options_.rendezvous, host_name());
    if (code != EADDRINUSE) fail_errno(code, format_text("listening at the rendezvous '{}'", options_.rendezvous));
    if (Clock::now() >= last_try)
      throw Error(FSDP_INVALID_ARGUMENT,
                  format_text("rank 0 cannot listen at the rendezvous '{}': another process does; is there a second "
                              "rank 0, or another job of the same rendezvous?",
                              options_.rendezvous),
                  0, FSDP_ORIGIN_OS, code);
    waiter_.poll();
    ::usleep(slice_ms * 1000);
  }
  at_ = Endpoint::local(listener_);
  if (point_.kind == MeetingPoint::Kind::file) notice_ = std::make_unique<Notice>(notice_path(point_, options_), at_);
}

bool TcpHost::has_room() {
  if (guests_.size() < most_guests) return true;
  const auto oldest = std::find_if(guests_.begin(), guests_.end(), [](const Guest &guest) { return !guest.proven(); });
  if (oldest == guests_.end() || Clock::now() - oldest->since < least_time) return false;
  guests_.erase(oldest);
  return true;
}

// Sleeps until something happens, then hears everybody.
void TcpHost::look_around() {
  std::vector<pollfd> polls;
  if (has_room()) polls.push_back({listener_.get(), POLLIN, 0});
  for (const Guest &guest : guests_) polls.push_back({guest.stream.socket().get(), POLLIN, 0});
  for (const Seat &seat : seats_)
    if (seat.stream) polls.push_back({seat.stream.socket().get(), POLLIN, 0});
  ::poll(polls.data(), polls.size(), slice_ms);
  const auto now = Clock::now();
  std::erase_if(guests_, [&](Guest &guest) { return !hear(guest) || now - guest.since >= guest_time; });
  check_joined();
  accept_guests();
}

void TcpHost::accept_guests() {
  while (has_room()) {
    Fd socket = accept_from(listener_);
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE)
        accept_problem_ = "; rank 0 could not take more connections: too many open files (see ulimit -n)";
      return;
    }
    guests_.push_back(
        {Stream(std::move(socket), message::longest), Handshake(Role::host, options_.secret, label_), Clock::now()});
    if (!hear(guests_.back())) guests_.pop_back();  // sends the challenge
  }
}

// What is not expected ends the connection; a rank that was right tries again.
bool TcpHost::hear(Guest &guest) {
  if (!guest.proven() && guest.proof.advance(guest.stream.socket()) != Handshake::State::proven)
    return guest.proof.state() == Handshake::State::waiting;
  auto frame = guest.stream.receive();
  if (!frame) return guest.stream.open();
  auto parsed = message::parse(frame->kind, frame->body);
  if (auto *words = std::get_if<message::Join>(&parsed.message)) join(guest, *words);
  return false;
}

void TcpHost::refuse(Guest &guest, fsdp_status status, const std::string &text) {
  guest.stream.queue(
      std::make_shared<const std::vector<std::byte>>(message::write(message::Refusal{status, -1, text})));
  guest.stream.flush();  // so few bytes fit into any socket's buffer
}

void TcpHost::join(Guest &guest, message::Join &join) {
  const auto wrong = [&](fsdp_status status, const std::string &text) { refuse(guest, status, text); };
  if (join.attempt < options_.attempt)
    return wrong(FSDP_PEER_FAILED, format_text("rank 0 has begun attempt {} of this job, rank {} is of attempt {}",
                                               options_.attempt, join.rank, join.attempt));
  if (join.attempt > options_.attempt) {
    wrong(FSDP_OK, "rank 0 is still of an earlier attempt");
    cancel(Error(FSDP_PEER_FAILED,
                 format_text("rank {} has begun attempt {} of this job, rank 0 is of attempt {}", join.rank,
                             join.attempt, options_.attempt),
                 static_cast<int32_t>(join.rank)));
  }
  if (join.world_size != options_.size)
    return wrong(FSDP_MISMATCH, format_text("rank {} says that the world has {} ranks, rank 0 says {}", join.rank,
                                            join.world_size, options_.size));
  if (join.rank >= options_.size)
    return wrong(FSDP_INVALID_ARGUMENT, format_text("rank {} is outside [0, {})", join.rank, options_.size));
  Seat &seat = seats_[join.rank];
  if (seat.taken)
    return wrong(FSDP_INVALID_ARGUMENT, format_text("another process is rank {} already, on {}", join.rank, seat.host));
  seat = {std::move(guest.stream), std::move(join.host_id), std::move(join.host), std::move(join.card), true};
  ++joined_;
}

// A rank that joined and died would be waited for by all. It has nothing to say before the start.
void TcpHost::check_joined() {
  for (uint32_t r = 1; r < seats_.size(); ++r) {
    Seat &seat = seats_[r];
    if (!seat.stream || (!seat.stream.receive() && seat.stream.open())) continue;
    cancel(Error(FSDP_PEER_FAILED,
                 format_text("rank {} on {} died before the job had formed: {}", r, seat.host, seat.stream.problem()),
                 static_cast<int32_t>(r)));
  }
}

std::vector<uint32_t> TcpHost::missing() const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < seats_.size(); ++r)
    if (!seats_[r].taken) ranks.push_back(r);
  return ranks;
}

void TcpHost::check_timeout() {
  if (joined_ == options_.size || Clock::now() < deadline_) return;
  const std::vector<uint32_t> ranks = missing();
  cancel(Error(
      FSDP_TIMEOUT,
      format_text("{} {} {} not come to the rendezvous '{}', where rank 0 listened at {}, within {} ms{}",
                  ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "), ranks.size() == 1 ? "has" : "have",
                  options_.rendezvous, at_.text(), options_.timeout_ms, accept_problem_),
      static_cast<int32_t>(ranks.front())));
}

void TcpHost::cancel(const Error &error) {
  const auto bytes = std::make_shared<const std::vector<std::byte>>(
      message::write(message::Refusal{error.status, error.rank, error.message}));
  for (Seat &seat : seats_) {
    if (!seat.stream) continue;
    seat.stream.queue(bytes);
    seat.stream.flush();
  }
  throw error;
}

Roster TcpHost::make_roster() {
  std::vector<std::string> ids;
  for (const Seat &seat : seats_) ids.push_back(seat.host_id);
  const auto nodes = number_nodes(ids);
  Roster roster;
  std::vector<uint32_t> counts(options_.size);
  for (uint32_t r = 0; r < options_.size; ++r) {
    if (++counts[nodes[r]] > most_ranks_of_a_host)
      cancel(Error(FSDP_UNSUPPORTED, format_text("more than {} ranks on {}; this release has no more on one host",
                                                 most_ranks_of_a_host, seats_[r].host)));
    roster.members.push_back({nodes[r], std::move(seats_[r].host), std::move(seats_[r].card)});
  }
  return roster;
}

void TcpHost::send_roster(const Assembly &assembly) {
  auto all = std::make_shared<std::vector<std::byte>>();
  const auto add = [&](const message::Message &message) {
    const auto frame = message::write(message);
    all->insert(all->end(), frame.begin(), frame.end());
  };
  for (uint32_t r = 0; r < options_.size; ++r) {
    const Member &member = assembly.roster.members[r];
    add(message::Entry{r, member.node, member.host, member.card});
  }
  add(message::Start{options_.size, assembly.session});
  for (Seat &seat : seats_)
    if (seat.stream) seat.stream.queue(all);
  for (;;) {
    std::vector<pollfd> polls;
    for (uint32_t r = 1; r < seats_.size(); ++r) {
      Stream &stream = seats_[r].stream;
      if (!stream.flush() && !stream.open())
        cancel(Error(FSDP_PEER_FAILED, format_text("rank {} died before the job had formed: {}", r, stream.problem()),
                     static_cast<int32_t>(r)));
      if (stream.sending()) polls.push_back({stream.socket().get(), POLLOUT, 0});
    }
    if (polls.empty()) return;
    if (Clock::now() >= deadline_)
      cancel(Error(FSDP_TIMEOUT, format_text("{} ranks do not read what rank 0 sends", polls.size())));
    waiter_.poll();
    ::poll(polls.data(), polls.size(), slice_ms);
  }
}

}  // namespace fsdp::comm
