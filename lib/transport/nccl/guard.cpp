// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/guard.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/library_thread.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {
namespace {

constexpr int interval_ms = 20;
constexpr auto end_patience = std::chrono::seconds(10);

}  // namespace

// State that the thread owns. If the guard ends and the thread does not return, the thread and this state are left
// behind.
struct Guard::State {
  std::mutex mutex;
  std::vector<std::shared_ptr<Guarded>> entries;
  bool stop = false, finished = false;
  std::shared_ptr<Team> host;  // this and the members below are not used after `stop`
  Failure *failure = nullptr;
  std::string name;
  Fd wake;

  void ring() const noexcept {
    const uint64_t one = 1;
    (void)!::write(wake.get(), &one, sizeof one);
  }
  void sleep() const noexcept {
    pollfd entry{wake.get(), POLLIN, 0};
    uint64_t count = 0;
    if (::poll(&entry, 1, interval_ms) > 0) (void)!::read(wake.get(), &count, sizeof count);
  }
  void inspect();
  bool round();
};

// Called under the lock, so that the guard cannot end during the call.
void Guard::State::inspect() {
  try {
    std::string awaited;
    for (const auto &guarded : entries) {
      if (auto error = guarded->look()) failure->set(*error);
      if (awaited.empty()) awaited = guarded->awaited();
    }
    host->look(awaited.empty() ? name : awaited, !awaited.empty());
  } catch (...) {
    failure->set(current_error());
  }
  if (!failure->failed()) return;
  for (const auto &guarded : entries) Handle::abort(guarded->handle());
}

bool Guard::State::round() {
  const std::lock_guard lock(mutex);
  if (stop) return false;
  inspect();
  return true;
}

Guard::Guard(std::shared_ptr<Team> host, Failure &failure, const std::string &name)
    : state_(std::make_shared<State>()) {
  state_->host = std::move(host);
  state_->failure = &failure;
  state_->name = name;
  state_->wake = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state_->wake) fail_errno(errno, "the eventfd of NCCL's guard");
  auto argument = std::make_unique<std::shared_ptr<State>>(state_);
  // The thread runs NCCL's code, so it has the system's default stack.
  thread_ = LibraryThread{"fsdp-nccl", "NCCL's guard", 0}.start(work, argument.get());
  (void)argument.release();
}

Guard::~Guard() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    state_->host.reset();
    state_->failure = nullptr;
  }
  state_->ring();
  const auto last = std::chrono::steady_clock::now() + end_patience;
  const auto finished = [this] {
    const std::lock_guard lock(state_->mutex);
    return state_->finished;
  };
  while (!finished() && std::chrono::steady_clock::now() < last)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (finished())
    pthread_join(thread_, nullptr);
  else
    pthread_detach(thread_);
}

void Guard::add(std::shared_ptr<Guarded> guarded) {
  const std::lock_guard lock(state_->mutex);
  state_->entries.push_back(std::move(guarded));
}

void Guard::remove(const std::shared_ptr<Guarded> &guarded) noexcept {
  const std::lock_guard lock(state_->mutex);
  std::erase(state_->entries, guarded);
}

void *Guard::work(void *argument) {
  const std::unique_ptr<std::shared_ptr<State>> owner(static_cast<std::shared_ptr<State> *>(argument));
  const std::shared_ptr<State> state = *owner;
  allow_calls_during_captures();
  while (state->round()) state->sleep();
  const std::lock_guard lock(state->mutex);
  state->entries.clear();
  state->finished = true;
  return nullptr;
}

}  // namespace fsdp::transport::nccl
