// SPDX-License-Identifier: Apache-2.0
// The rounds of a TcpTransport, in which it sends and receives, accepts peers and connects to others; and the threads
// that drive: the background thread, or a thread that waits for a call.
#include <sys/epoll.h>
#include <sys/timerfd.h>

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
constexpr uint64_t timer_tag = UINT64_MAX - 2;  // only on sleep_

// The thread stays awake for this time, because the next message often arrives soon, and a wake-up would take longer.
constexpr auto awake_time = std::chrono::microseconds(20);
// At least for this time after another thread drove, the background thread does not look at connections.
constexpr auto rest_time = std::chrono::milliseconds(2);
constexpr size_t few_ranks = 4;
// After this time a thread that drives looks at all connections, and not only at those of its call.
constexpr auto longest_time_between_looks = std::chrono::milliseconds(10);
constexpr int look_ms = 1000, forming_look_ms = 200, redial_look_ms = 10, stopping_look_ms = 1;
constexpr auto longest_pause = std::chrono::milliseconds(1000);
constexpr auto dial_time = std::chrono::seconds(10);  // limit of one attempt
constexpr size_t max_strangers = 64;                  // fewer than spare_descriptors

bool watch_in(int epoll, int fd, uint64_t tag, uint32_t events, int operation) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  return ::epoll_ctl(epoll, operation, fd, &event) == 0;
}

}  // namespace

void TcpTransport::start_thread() {
  watch(wake_.get(), wake_tag, EPOLLIN, EPOLL_CTL_ADD);
  // The background thread sleeps on these.
  const std::pair<int, uint64_t> wakers[] = {{wake_.get(), wake_tag}, {timer_.get(), timer_tag}, {events_.get(), 0}};
  for (const auto &[descriptor, tag] : wakers) watch_in(sleep_.get(), descriptor, tag, EPOLLIN, EPOLL_CTL_ADD);
  const auto body = [](void *self) -> void * {
    static_cast<TcpTransport *>(self)->run();
    return nullptr;
  };
  const size_t stack = tls_ ? 0 : LibraryThread::small_stack;  // libssl is foreign code and may need more
  thread_ = LibraryThread{"fsdp-tcp", format_text("messages of rank {}", rank_), stack}.start(body, this);
}

bool TcpTransport::watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept {
  return watch_in(events_.get(), fd, tag, events, operation);
}

// Decides whether events of connections wake the background thread.
void TcpTransport::watch_events(bool wanted) noexcept {
  if (watching_ == wanted) return;
  if (watch_in(sleep_.get(), events_.get(), 0, wanted ? uint32_t{EPOLLIN} : 0, EPOLL_CTL_MOD)) watching_ = wanted;
}

template <class Act>
void TcpTransport::guarded(Act &&act) noexcept {
  try {
    act();
  } catch (const std::bad_alloc &) {
    fail_context(Error(FSDP_OUT_OF_MEMORY, "messages", static_cast<int32_t>(rank_)));
  } catch (const Error &error) {
    fail_context(error);
  }
}

void TcpTransport::run() noexcept {
  for (bool goes_on = true; goes_on;)
    guarded([&] {
      goes_on = begin_round();
      if (!goes_on) return;
      if (sleep_ms_ > 0) sleep();
      do_round(0);
      if (!moved_ && sleep_ms_ == 0) ::sched_yield();
    });
}

// Returns false if the thread must end.
bool TcpTransport::begin_round() {
  let_others_go_first();
  const std::lock_guard guard(mutex_);
  if (stopping_ && !std::exchange(stops_, true)) refusals_.set_log({});  // later refusals do not matter
  if (stops_ && may_stop()) return false;
  handle_dirty_peers();
  const bool awake = (tls_ || !has_short_calls()) && (moved_ || Clock::now() - moved_at_ <= awake_time);
  const bool sleeps = dirty_.empty() && !can_write() && !awake;
  if (sleeps) watch_events(true);
  sleep_ms_ = !sleeps ? 0 : stops_ ? stopping_look_ms : forms() ? forming_ms() : look_ms;
  asleep_ = sleeps;
  return true;
}

// Called with the mutex held. Peers that become dirty here are handled in the next round.
void TcpTransport::handle_dirty_peers() {
  joined_ = !peers_.empty();
  world_size_ = peers_.size();
  answer_for_nobody();
  for (size_t left = dirty_.size(); left > 0; --left) {
    const uint32_t r = dirty_.front();
    dirty_.erase(dirty_.begin());  // erased first, because look_at() may throw
    look_at(r);
  }
}

bool TcpTransport::can_write() const noexcept {
  return std::ranges::any_of(writers_, [this](uint32_t r) { return !peers_.find(r)->blocked; });
}

// The background thread sleeps until there are events, or another thread wakes it. While other threads drive, and for a
// short time afterwards, events do not wake it.
void TcpTransport::sleep() {
  for (bool rested = false; !rested;) {
    epoll_event event;
    const int count = ::epoll_wait(sleep_.get(), &event, 1, sleep_ms_);
    std::unique_lock lock(mutex_);
    undriven_.wait(lock, [this] { return !driven_; });
    rested = count != 1 || event.data.u64 != timer_tag || !extend_rest();
    if (rested) asleep_ = false;
  }
}

// Called with the mutex held when the timer has ended. Starts it again, or lets events wake the background thread.
// Returns whether the background thread sleeps on.
bool TcpTransport::extend_rest() noexcept {
  uint64_t times = 0;
  while (::read(timer_.get(), &times, sizeof times) < 0 && errno == EINTR) {
  }
  timed_ = false;
  if (asleep_ && Clock::now() - driven_at_ < rest_time)
    set_timer();
  else
    watch_events(true);
  return asleep_;
}

void TcpTransport::set_timer() noexcept {
  itimerspec time{};
  time.it_value.tv_nsec = std::chrono::nanoseconds(rest_time).count();
  timed_ = ::timerfd_settime(timer_.get(), 0, &time, nullptr) == 0;
}

// Writes, then waits up to `ms` for events and handles them. `ms` must be 0 if there is other work.
void TcpTransport::do_round(int ms) {
  moved_ = false;
  introducing_ = forms() && Clock::now() - introduced_at_ >= std::chrono::milliseconds(forming_ms());
  for (const uint32_t r : writers_)
    if (!peers_[r].blocked) write(r);
  std::erase_if(writers_, [this](uint32_t r) { return !peers_[r].writing; });
  take_events(ms);
  if (introducing_ || !acceptor_) introduce();
  for (const uint32_t r : fresh_)
    if (peers_[r].link) read(r);
  fresh_.clear();
  if (moved_) moved_at_ = Clock::now();
}

// The timeout for the thread's sleep. Events of sockets wake the thread, so only deadlines and pauses need timeouts.
int TcpTransport::forming_ms() const noexcept {
  const bool pauses = std::ranges::any_of(dialed_, [this](uint32_t r) { return !peers_.find(r)->dialing; });
  return pauses || !watched_ ? redial_look_ms : forming_look_ms;
}

void TcpTransport::take_events(int ms) {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(events_.get(), events.data(), static_cast<int>(events.size()), ms);
  looked_at_ = Clock::now();
  if (ms > 0) {
    const std::lock_guard guard(mutex_);
    asleep_ = false;
  }
  for (int i = 0; i < count; ++i) {
    const epoll_event &event = events[static_cast<size_t>(i)];
    take_event(event.data.u64, event.events);
  }
}

// ---- threads that wait for a call ----

// Only a sleeping background thread leaves the connections alone. With TLS only the background thread drives, because
// libssl may need more stack than the threads of streams have.
bool TcpTransport::begin_driving() noexcept {
  if (tls_ || !asleep_.load(std::memory_order_relaxed)) return false;
  const auto guard = lock();
  if (!asleep_ || driven_ || peers_.empty()) return false;
  watch_events(false);
  if (watching_) return false;
  driven_ = true;
  asleep_ = false;
  return true;
}

void TcpTransport::drive(std::span<const uint32_t> ranks, uint32_t ms) noexcept {
  guarded([&] {
    int sleep_ms = 0;
    bool idle = false;
    {
      const auto guard = lock();
      handle_dirty_peers();
      idle = dirty_.empty() && writers_.empty() && fresh_.empty();
      const bool sleeps = ms > 0 && dirty_.empty() && !can_write();
      if (sleeps) sleep_ms = std::min(static_cast<int>(ms), forms() ? forming_ms() : look_ms);
      asleep_ = sleeps;
    }
    // Reading from a few connections takes less time than epoll_wait().
    const bool look_is_due = Clock::now() - looked_at_ > longest_time_between_looks;
    if (ms > 0 || !idle || look_is_due || ranks.size() > few_ranks) return do_round(sleep_ms);
    for (const uint32_t r : ranks)
      if (r != rank_ && peers_[r].link) read(r);
  });
}

// The next short call often begins soon, and the messages of peers may come before it begins. For a short time they do
// not wake the background thread, unless something is left to do or other calls are under way.
void TcpTransport::end_driving() noexcept {
  const auto guard = lock();
  driven_ = false;
  asleep_ = true;
  driven_at_ = Clock::now();
  if (!timed_) set_timer();
  const bool left = !dirty_.empty() || !fresh_.empty() || can_write() || receivers_.has_questions();
  if (!timed_ || left || has_calls() || forms()) wake();
  undriven_.notify_one();
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
