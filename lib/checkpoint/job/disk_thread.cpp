// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/disk_thread.h"

#include <utility>

#include "base/library_thread.h"

namespace fsdp::checkpoint {

DiskThread::DiskThread(std::shared_ptr<SaveFolder> folder, std::shared_ptr<ShardWriter> writer)
    : state_(std::make_shared<DiskWork>()) {
  state_->folder = std::move(folder), state_->writer = std::move(writer);
  auto kept = std::make_unique<std::shared_ptr<DiskWork>>(state_);
  thread_ = LibraryThread{"fsdp-disk", "a save's files"}.start(run, kept.get());
  kept.release();  // the thread owns it now
}

DiskThread::~DiskThread() {
  // Has no effect if everything is written.
  if (state_->writer) state_->writer->give_up(FSDP_ABORTED, "the save was given up");
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->ends = true;
    state_->changed.notify_all();
    ended = state_->changed.wait_for(lock, patience_, [&] { return state_->ended; });
  }
  if (ended)
    pthread_join(thread_, nullptr);
  else
    pthread_detach(thread_);
}

void *DiskThread::run(void *kept) {
  const std::unique_ptr<std::shared_ptr<DiskWork>> state(static_cast<std::shared_ptr<DiskWork> *>(kept));
  if ((*state)->writer) (*state)->writer->write();
  serve(**state);
  return nullptr;
}

void DiskThread::serve(DiskWork &state) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.work || state.ends; });
    if (!state.work) break;
    const std::function<void(SaveFolder &)> work =
        std::move(state.work);  // moved out, so that no other thread can replace it during the work
    state.work = nullptr;
    lock.unlock();
    std::optional<Error> failure = capture_error([&] { work(*state.folder); });
    lock.lock();
    state.failure = std::move(failure);
    state.busy = false;
    state.changed.notify_all();
  }
  state.ended = true;
  state.changed.notify_all();
}

void DiskThread::begin(std::function<void(SaveFolder &)> work) {
  const std::lock_guard lock(state_->mutex);
  state_->work = std::move(work);
  state_->busy = true;
  state_->changed.notify_all();
}

bool DiskThread::idle() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->busy;
}

void DiskThread::await_idle(std::chrono::milliseconds longest) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, longest, [&] { return !state_->busy; });
}

void DiskThread::result() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->failure) throw *state_->failure;
}

}  // namespace fsdp::checkpoint
