// SPDX-License-Identifier: Apache-2.0
// TcpTransport's thread: it sends and receives, accepts peers and connects to others.
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "base/library_thread.h"
#include "transport/message/tcp/transport.h"

namespace fsdp::transport::tcp {
namespace {

using messages::Kind;
using messages::Receiver;

// Tags of events that do not belong to a peer.
constexpr uint64_t wake_tag = UINT64_MAX, introduction_tag = UINT64_MAX - 1;

// The thread stays awake for this time, because the next message often arrives soon, and a wake-up would take longer.
constexpr auto awake_time = std::chrono::microseconds(20);
constexpr int look_ms = 1000, forming_look_ms = 200, redial_look_ms = 10, stopping_look_ms = 1;
constexpr auto longest_pause = std::chrono::milliseconds(1000);
constexpr auto dial_time = std::chrono::seconds(10);  // limit of one attempt
constexpr size_t max_strangers = 64;                  // fewer than spare_descriptors

}  // namespace

void TcpTransport::start_thread() {
  watch(wake_.get(), wake_tag, EPOLLIN, EPOLL_CTL_ADD);
  const auto body = [](void *self) -> void * {
    static_cast<TcpTransport *>(self)->run();
    return nullptr;
  };
  const size_t stack = tls_ ? 0 : LibraryThread::small_stack;  // libssl is foreign code and may need more
  thread_ = LibraryThread{"fsdp-tcp", format_text("messages of rank {}", rank_), stack}.start(body, this);
}

bool TcpTransport::watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  return ::epoll_ctl(events_.get(), operation, fd, &event) == 0;
}

void TcpTransport::run() noexcept {
  for (;;) {
    try {
      if (!begin_round()) return;
      do_round();
    } catch (const std::bad_alloc &) {
      fail_context(Error(FSDP_OUT_OF_MEMORY, "messages", static_cast<int32_t>(rank_)));
    } catch (const Error &error) {
      fail_context(error);
    }
  }
}

// Returns false if the thread must end.
bool TcpTransport::begin_round() {
  let_others_go_first();
  const std::lock_guard guard(mutex_);
  if (stopping_ && !std::exchange(stops_, true)) refusals_.set_log({});  // later refusals do not matter
  joined_ = !peers_.empty();
  world_size_ = peers_.size();
  if (stops_ && may_stop()) return false;
  answer_for_nobody();
  // Peers that become dirty here are handled in the next round.
  for (size_t left = dirty_.size(); left > 0; --left) {
    const uint32_t r = dirty_.front();
    dirty_.erase(dirty_.begin());  // erased first, because look_at() may throw
    look_at(r);
  }
  const bool writes = std::ranges::any_of(writers_, [this](uint32_t r) { return !peers_[r].blocked; });
  const bool awake = moved_ || Clock::now() - moved_at_ <= awake_time;
  asleep_ = sleeps_ = dirty_.empty() && !writes && !awake;
  return true;
}

void TcpTransport::do_round() {
  moved_ = false;
  introducing_ = forms() && Clock::now() - introduced_at_ >= std::chrono::milliseconds(forming_ms());
  for (const uint32_t r : writers_)
    if (!peers_[r].blocked) write(r);
  std::erase_if(writers_, [this](uint32_t r) { return !peers_[r].writing; });
  await_events();
  if (introducing_ || !acceptor_) introduce();
  for (const uint32_t r : fresh_)
    if (peers_[r].link) read(r);
  fresh_.clear();
  if (moved_) moved_at_ = Clock::now();
  if (!moved_ && !sleeps_) ::sched_yield();
}

// The timeout for the thread's sleep. Events of sockets wake the thread, so only deadlines and pauses need timeouts.
int TcpTransport::forming_ms() const noexcept {
  const bool pauses = std::ranges::any_of(dialed_, [this](uint32_t r) { return !peers_.find(r)->dialing; });
  return pauses || !watched_ ? redial_look_ms : forming_look_ms;
}

void TcpTransport::await_events() {
  std::array<epoll_event, 64> events;
  const int ms = !sleeps_ ? 0 : stops_ ? stopping_look_ms : forms() ? forming_ms() : look_ms;
  const int count = ::epoll_wait(events_.get(), events.data(), static_cast<int>(events.size()), ms);
  if (sleeps_) {
    const std::lock_guard guard(mutex_);
    asleep_ = false;
  }
  for (int i = 0; i < count; ++i) {
    const epoll_event &event = events[static_cast<size_t>(i)];
    take_event(event.data.u64, event.events);
  }
}

void TcpTransport::take_event(uint64_t tag, uint32_t what) {
  if (tag == wake_tag) {
    uint64_t times = 0;
    while (::read(wake_.get(), &times, sizeof times) < 0 && errno == EINTR) {
    }
    return;
  }
  introducing_ = introducing_ || tag >= introduction_tag;
  if (tag >= introduction_tag) return;
  const auto r = static_cast<uint32_t>(tag);
  Peer &peer = peers_[r];
  if (!peer.link) return;
  if (what & EPOLLOUT && std::exchange(peer.blocked, false)) {
    watch(peer.link->socket().get(), r, EPOLLIN, EPOLL_CTL_MOD);
    moved_ = true;
  }
  if (what & ~EPOLLOUT) read(r);
}

// ---- peers ----

void TcpTransport::write(uint32_t r) {
  Peer &peer = peers_[r];
  sent_.clear();
  peer.link->write(sent_);
  moved_ = true;
  const std::lock_guard guard(mutex_);
  for (const Header &header : sent_)
    if (Receiver *receiver = receivers_.find(header.key)) receiver->sent(Kind::data, r);
  // This comes after all sent() calls, because it may throw, and sent frames are reported only once.
  for (const Header &header : sent_)
    if (Receiver *receiver = receivers_.find(header.key)) receiver->move_on();
  if (!peer.link->open()) return fail_peer(r, peer.link->problem(), peer.link->code());
  if (!peer.queued.empty()) peer.link->take(peer.queued);
  peer.writing = peer.link->writing();
  if (!peer.writing || !peer.link->full()) return;
  peer.blocked = watch(peer.link->socket().get(), r, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
  if (!peer.blocked) fail_peer(r, "epoll does not take it", ENOMEM);
}

void TcpTransport::read(uint32_t r) {
  Peer &peer = peers_[r];
  peer.link->read(*this);
  moved_ = true;
  if (peer.link->open()) return;
  const std::lock_guard guard(mutex_);
  fail_peer(r, peer.link->problem(), peer.link->code());
}

bool TcpTransport::control(const Header &header, const std::byte *payload, uint64_t bytes) {
  const std::lock_guard guard(mutex_);
  Receiver *receiver = receivers_.find(header.key);
  if (!receiver) return receivers_.keep(header, payload, bytes);
  receiver->control(header, payload, bytes);
  receiver->move_on();
  return true;
}

messages::Place TcpTransport::place(const Header &header) {
  const std::lock_guard guard(mutex_);
  Receiver *receiver = receivers_.find(header.key);
  return receiver ? receiver->place(header, header.bytes) : messages::Place{};
}

void TcpTransport::arrived(const Header &header) {
  const std::lock_guard guard(mutex_);
  Receiver *receiver = receivers_.find(header.key);
  if (!receiver) return;
  receiver->arrived(header);
  receiver->move_on();
}

// ---- connections ----

// Many simultaneous strangers do not wake the thread; it then checks regularly.
void TcpTransport::take_arrivals() {
  if (!acceptor_)
    acceptor_.emplace(names_.secret, names_.label(rank_), &refusals_, max_strangers, std::move(acceptor_events_))
        .listen(listener_);
  for (Acceptor::AuthenticatedSocket &arrival : acceptor_->look(introductions_.size() <= world_size_)) {
    introductions_.push_back(
        std::make_unique<Introduction>(names_, std::move(arrival), Clock::now() + Acceptor::message_time));
    watch(introductions_.back()->socket().get(), introduction_tag, EPOLLIN | EPOLLOUT | EPOLLET, EPOLL_CTL_ADD);
  }
  const bool wanted = !acceptor_->crowded();
  if (wanted == watched_) return;
  const bool done = watch(acceptor_->descriptor(), introduction_tag, EPOLLIN, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL);
  watched_ = wanted && done;
}

void TcpTransport::introduce() {
  if (!joined_) return;
  introduced_at_ = Clock::now();
  take_arrivals();
  for (size_t i = 0; i < introductions_.size();) {
    const IoState state = introductions_[i]->advance();
    if (state == IoState::waiting) {
      ++i;
      continue;
    }
    const auto over = std::move(introductions_[i]);
    introductions_.erase(introductions_.begin() + static_cast<std::ptrdiff_t>(i));  // first: let_in() may throw
    if (state == IoState::done)
      let_in(*over);
    else
      refusals_.note(over->from(), over->problem());
  }
  for (const uint32_t r : dialed_) see_to_dial(r);
  const std::lock_guard guard(mutex_);
  std::erase_if(dialed_, [this](uint32_t r) { return peers_[r].open || peers_[r].closing; });
  dials_ = dialed_.size();
}

// A peer has only one connection. A second one that claims to be from the same rank was not made by this library.
void TcpTransport::let_in(Introduction &other) {
  const uint32_t r = other.peer();
  const std::lock_guard guard(mutex_);
  if (peers_[r].open || peers_[r].closing)
    return refusals_.note(other.from(), format_text("it says that it is rank {}, which has a connection already", r));
  watch(other.socket().get(), 0, 0, EPOLL_CTL_DEL);
  open(r, other);
}

// A refused connection is tried again while calls wait, because the other end may be too busy.
void TcpTransport::see_to_dial(uint32_t r) {
  Peer &peer = peers_[r];
  const auto now = Clock::now();
  {
    const std::lock_guard guard(mutex_);
    if (peer.open || peer.closing) return;
  }
  if (!peer.dialing) {
    if (now < peer.redial) return;
    const auto deadline = std::min(peer.expiry, now + dial_time);
    peer.dialing = std::make_unique<Introduction>(names_, r, peer.place, deadline, peer.expiry);
    if (peer.dialing->socket())
      watch(peer.dialing->socket().get(), introduction_tag, EPOLLIN | EPOLLOUT | EPOLLET, EPOLL_CTL_ADD);
  }
  const IoState state = peer.dialing->advance();
  if (state == IoState::waiting) return;
  const std::lock_guard guard(mutex_);
  if (peer.closing) return peer.dialing.reset();
  if (state == IoState::done) {
    watch(peer.dialing->socket().get(), 0, 0, EPOLL_CTL_DEL);
    open(r, *peer.dialing);
  } else if (peer.dialing->final() || now >= peer.expiry) {
    fail_peer(r, peer.dialing->problem(), peer.dialing->code());
  }
  peer.dialing.reset();
  peer.redial = now + peer.pause;
  peer.pause = std::min(2 * peer.pause, longest_pause);
}

}  // namespace fsdp::transport::tcp
