// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/launches.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace fsdp::transport::nccl {

Launches::Launches(std::unique_ptr<Connection> connection, device::Device &device, std::shared_ptr<LaunchOrder> order,
                   uint64_t &launched, const Waiter &waiter, Failure &failure)
    : connection_(std::move(connection)),
      library_(connection_->shared_library()),
      world_rank_(connection_->plan().world_rank),
      order_(std::move(order)),
      launched_(launched),
      waiter_(waiter),
      failure_(failure) {
  for (LaunchSlot &slot : slots_) {
    slot.begin = device.create_event();
    slot.end = device.create_event();
  }
}

void Launches::begin(const char *operation, const Tag &tag, uint64_t bytes, device::Stream &stream, uint64_t hash) {
  failure_.check();
  connection_->handle()->doubt({});  // peers that take part in this collective will not abort it
  if (enqueued_all_)
    fail(FSDP_INTERNAL, "{} of '{}' after this rank has said that nothing more comes in this round", operation,
         tag.name);
  what_ = format_text("{} of '{}' (#{}, {} bytes)", operation, tag.name, history_.count, bytes);
  // Only eager work is added: graphs are compared separately, and the work of a failed capture never runs.
  if (!stream.capture_id()) add_to_history(tag.what, hash);
  {
    const std::lock_guard lock(mutex_);
    oldest_ = std::max(oldest_, next_ + 1 - std::min(next_ + 1, kept));
  }
  if (order_) order_->enter(stream);
  LaunchSlot &mine = slot(next_);
  mine.what = what_;
  stream.record(*mine.begin);
}

void Launches::add_to_history(uint64_t what, uint64_t hash) noexcept {
  constexpr uint64_t prime = 0x100000001b3;  // FNV-1a
  for (const char letter : what_) history_.hash = (history_.hash ^ static_cast<unsigned char>(letter)) * prime;
  history_.hash = (history_.hash ^ what) * prime;
  history_.hash = (history_.hash ^ hash) * prime;
  history_.hash = (history_.hash ^ ++launched_) * prime;
  ++history_.count;
  std::strncpy(history_.last, what_.c_str(), sizeof history_.last - 1);
}

// Lives while the caller is in NCCL.
class Launches::Launching {
 public:
  explicit Launching(Launches &launches) : launches_(launches) { launches_.mark_launching(true); }
  ~Launching() { launches_.mark_launching(false); }
  Launching(const Launching &) = delete;
  Launching &operator=(const Launching &) = delete;

 private:
  Launches &launches_;
};

void Launches::run(device::Stream &stream, const std::function<void(Comm *)> &enqueue) {
  try {
    if (stream.capture_id()) connection_->note_capture();
    const Launching launching(*this);
    connection_->launch(what_, enqueue);
  } catch (const Error &error) {
    failure_.set(error);
    throw;
  }
  if (order_) order_->leave(stream);
}

Ticket Launches::end(device::Stream &stream) {
  stream.record(*slot(next_).end);
  const std::lock_guard lock(mutex_);
  return Ticket{++next_};
}

// A reused slot belongs to a later collective of the same order, so the wait only takes longer than needed.
void Launches::await(Ticket ticket, device::Stream &stream) {
  if (ticket.phase == 0) return;
  failure_.check();
  stream.wait(*slot(ticket.phase - 1).end);
}

bool Launches::released(Ticket ticket) const noexcept {
  return ticket.phase == 0 || failure_.failed() || done(ticket.phase - 1);
}

bool Launches::drain(uint32_t timeout_ms) const noexcept {
  const auto last = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (next_ != 0 && !done(next_ - 1)) {
    if (failure_.failed() || Clock::now() >= last) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

std::shared_ptr<Handle> Launches::handle() const {
  const std::lock_guard lock(mutex_);
  return connection_->handle();
}

void Launches::replace(std::unique_ptr<Connection> connection) {
  const std::lock_guard lock(mutex_);
  connection_.swap(connection);
  history_ = {};
  oldest_ = next_;
  stalled_at_ = UINT64_MAX;
}

// How long the stream has worked on the oldest collective that is not done. Waits for the caller's earlier work do not
// count, because slow work is not stuck work.
Clock::duration Launches::stalled() {
  oldest_ = std::max(oldest_, next_ - std::min(next_, kept));
  while (oldest_ < next_ && done(oldest_)) ++oldest_;
  if (oldest_ == next_ || !slot(oldest_).begin->done()) {
    stalled_at_ = UINT64_MAX;
    return {};
  }
  if (stalled_at_ != oldest_) {
    stalled_at_ = oldest_;
    stalled_since_ = Clock::now();
  }
  return Clock::now() - stalled_since_;
}

void Launches::mark_launching(bool launching) {
  const std::lock_guard lock(mutex_);
  launching_since_ = launching ? std::optional(Clock::now()) : std::nullopt;
}

Clock::duration Launches::held() {
  if (!launching_since_) return {};
  if (oldest_ != next_) launching_since_ = Clock::now();
  return Clock::now() - *launching_since_;
}

std::optional<Error> Launches::look() noexcept {
  const std::shared_ptr<Handle> handle = this->handle();
  if (const auto found = handle->look())
    return error_of(*library_, nullptr, *found,
                    {"ncclCommGetAsyncError", format_text("NCCL communicator '{}'", handle->name()), world_rank_});
  const std::lock_guard lock(mutex_);
  const std::chrono::milliseconds timeout(waiter_.timeout_ms());
  const bool stuck = stalled() >= timeout;
  if (!stuck && held() < timeout) return std::nullopt;
  return Error(FSDP_TIMEOUT,
               format_text("{}: rank {} has waited for its peers {} for {} ms; NCCL does not say for which",
                           slot(stuck ? oldest_ : next_).what, world_rank_,
                           stuck ? "on the GPU" : "in NCCL, which connects them,", waiter_.timeout_ms()));
}

std::string Launches::awaited() const {
  const std::lock_guard lock(mutex_);
  if (launching_since_ && Clock::now() - *launching_since_ >= patience) return slot(next_).what;
  if (stalled_at_ != oldest_ || Clock::now() - stalled_since_ < patience) return {};
  return slot(stalled_at_).what;
}

}  // namespace fsdp::transport::nccl
