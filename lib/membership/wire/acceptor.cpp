// SPDX-License-Identifier: Apache-2.0
#include "membership/wire/acceptor.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "membership/wire/packet.h"

namespace fsdp::membership {
namespace {

// A flood of 2,000 connections a second still leaves each stranger its least time.
constexpr size_t max_places = 512, least_places = 128;
constexpr size_t crowd = 64;

bool control(const Fd &events, int operation, const Fd &socket, uint32_t what) noexcept {
  epoll_event event{};
  event.events = what;
  return ::epoll_ctl(events.get(), operation, socket.get(), &event) == 0;
}

bool has_connection(const Fd &listener) {
  pollfd entry{listener.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

bool is_of_another_user(const Fd &socket) {
  return Endpoint::local(socket).family() == AF_UNIX && peer_user(socket) != ::geteuid();
}

}  // namespace

bool RefusalLog::may_write(Clock::time_point now) noexcept {
  const auto due = static_cast<uint64_t>(std::max((now - refilled_) / line_time, Clock::duration::rep{0}));
  if (due > 0) {
    lines_left_ = static_cast<uint32_t>(std::min<uint64_t>(lines_at_once, lines_left_ + due));
    refilled_ = now;
  }
  if (lines_left_ == 0) return false;
  --lines_left_;
  return true;
}

void RefusalLog::note(const std::string &from, const std::string &why, Clock::time_point now) {
  if (!log_) return;
  if (!may_write(now)) {
    ++unwritten_;
    return;
  }
  const std::string others =
      unwritten_ == 0 ? "" : format_text("; {} others were refused since the last line", unwritten_);
  unwritten_ = 0;
  const std::string whence = from.empty() ? "" : " from " + from;
  log_(FSDP_LOG_WARNING, format_text("refused {}{}: {}{}", what_, whence, why, others));
}

size_t Acceptor::usual_places() {
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return std::clamp(known ? static_cast<size_t>(limit.rlim_cur / 4) : max_places, least_places, max_places);
}

Fd Acceptor::make_events() {
  Fd events(::epoll_create1(EPOLL_CLOEXEC));
  if (!events) fail_errno(errno, "epoll_create1 for connections between ranks");
  return events;
}

Acceptor::Acceptor(std::string_view secret, std::string label, RefusalLog *log, size_t places, Fd events)
    : secret_(secret), label_(std::move(label)), log_(log), places_(places), events_(std::move(events)) {}

void Acceptor::listen(const Fd &listener) {
  watch_listeners(false);
  listeners_.push_back(&listener);
  watch_listeners(true);
}

bool Acceptor::crowded() const noexcept { return strangers_.size() > crowd; }

void Acceptor::add_polls(std::vector<pollfd> &polls) const {
  if (!crowded()) polls.push_back({events_.get(), POLLIN, 0});
}

// A listener whose connections are not accepted stays readable, and would wake the caller again and again. If epoll
// refuses to watch a listener, the listener does not wake the caller, which then looks regularly.
void Acceptor::watch_listeners(bool wanted) noexcept {
  if (wanted && watched_) return;
  watched_ = wanted;
  for (const Fd *listener : listeners_)
    if (wanted)
      watched_ &= control(events_, EPOLL_CTL_ADD, *listener, EPOLLIN) || errno == EEXIST;
    else
      control(events_, EPOLL_CTL_DEL, *listener, 0);
}

// Handshakes continue before any stranger must make room, because an answer may have arrived since the last look.
std::vector<Acceptor::AuthenticatedSocket> Acceptor::look(bool takes) {
  epoll_event seen[2 * crowd];
  (void)::epoll_wait(events_.get(), seen, std::size(seen),
                     0);  // each edge wakes once
  std::vector<AuthenticatedSocket> arrivals;
  continue_handshakes(arrivals);
  if (takes && pause_.over()) accept(arrivals);
  watch_listeners(takes && pause_.over() && strangers_.size() < places_);
  return arrivals;
}

void Acceptor::continue_handshakes(std::vector<AuthenticatedSocket> &arrivals) {
  for (Place next = strangers_.begin(); next != strangers_.end();) next = advance(next, arrivals);
}

Acceptor::Place Acceptor::advance(Place stranger, std::vector<AuthenticatedSocket> &arrivals) {
  const Handshake &handshake = stranger->handshake;
  switch (stranger->handshake.advance(stranger->socket)) {
    case IoState::failed:
      if (!handshake.ended()) last_failure_ = format_text("{}: {}", stranger->from.name(), handshake.problem());
      return refuse(stranger, handshake.problem());
    case IoState::done:
      control(events_, EPOLL_CTL_DEL, stranger->socket, 0);
      arrivals.push_back({std::move(stranger->socket), stranger->from.name(), handshake.keys()});
      return strangers_.erase(stranger);
    case IoState::waiting: break;
  }
  if (Clock::now() - stranger->since < proof_time) return std::next(stranger);
  return refuse(stranger, handshake.has_heard() ? "the other end has not answered in time" : "it has said nothing");
}

// A child of this process may keep the socket open. In that case a close here ends neither the connection nor its
// events, so the socket leaves epoll and is shut down first.
Acceptor::Place Acceptor::refuse(Place stranger, const std::string &why) {
  if (log_) log_->note(stranger->from.name(), why);
  control(events_, EPOLL_CTL_DEL, stranger->socket, 0);
  ::shutdown(stranger->socket.get(), SHUT_RDWR);
  return strangers_.erase(stranger);
}

// A stranger must make room only if another connection waits.
void Acceptor::accept(std::vector<AuthenticatedSocket> &arrivals) {
  for (const Fd *listener : listeners_)
    for (size_t taken = 0; taken < places_ && has_connection(*listener) && has_room(); ++taken) {
      if (!take_from(*listener)) {
        if (!pause_.over()) make_room();  // this frees a descriptor
        break;
      }
      if (!strangers_.empty()) advance(std::prev(strangers_.end()), arrivals);  // sends the challenge
    }
}

// Returns false if no connection could be accepted.
bool Acceptor::take_from(const Fd &listener) {
  Fd socket = accept_from(listener);
  if (!socket) {
    pause_.note(errno);
    return false;
  }
  pause_.clear();
  if (is_of_another_user(socket)) return true;
  const Endpoint from = Endpoint::peer(socket);
  control(events_, EPOLL_CTL_ADD, socket, EPOLLIN | EPOLLET);
  strangers_.push_back({std::move(socket), from, from.address(), Handshake(Role::host, secret_, label_), Clock::now()});
  return true;
}

// The oldest stranger from the address that has more than half of the places; end() if there is no such address. Uses
// the majority vote of Boyer and Moore. Processes of this host have no addresses that distinguish them.
Acceptor::Place Acceptor::find_oldest_of_most() {
  const std::string *most = nullptr;
  size_t votes = 0;
  for (const Stranger &s : strangers_) {
    if (s.from.family() == AF_UNIX) return strangers_.end();
    if (votes == 0) most = &s.address;
    votes = s.address == *most ? votes + 1 : votes - 1;
  }
  const auto is_of_most = [most](const Stranger &s) { return s.address == *most; };
  if (!most || static_cast<size_t>(std::ranges::count_if(strangers_, is_of_most)) <= places_ / 2)
    return strangers_.end();
  return std::ranges::find_if(strangers_, is_of_most);
}

bool Acceptor::has_room() { return strangers_.size() < places_ || make_room(); }

// Refuses the oldest stranger once it has had its least time; until then new connections wait in the kernel.
bool Acceptor::make_room() {
  Place one = strangers_.size() < places_ ? strangers_.end() : find_oldest_of_most();
  if (one == strangers_.end()) {
    one = strangers_.begin();
    if (one == strangers_.end() || Clock::now() - one->since < least_time) return false;
  }
  refuse(one, "it had proven nothing yet, and made room for a later one");
  return true;
}

}  // namespace fsdp::membership
