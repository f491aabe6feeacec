// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/home_thread.h"

#include <algorithm>
#include <cerrno>

#include "base/library_thread.h"

namespace fsdp::engine {
namespace {

using Clock = std::chrono::steady_clock;

// Room for the pages of a transfer, so that steps allocate nothing.
constexpr size_t usual_pages = 64;
// How long the destructor waits for a thread that the disk blocks.
constexpr std::chrono::milliseconds patience{1000};

}  // namespace

HomeThread::HomeThread(const char *name, std::shared_ptr<HomeFile> file, std::shared_ptr<device::Memory> memory,
                       bool is_freed)
    : is_freed_(is_freed), work_(std::make_shared<Work>()) {
  work_->file = std::move(file), work_->memory = std::move(memory);
  for (PageMove &transfer : work_->transfers) transfer.pages.reserve(usual_pages);
  auto kept = std::make_unique<std::shared_ptr<Work>>(work_);
  thread_ = LibraryThread{name, "the home file"}.start(run, kept.get());
  kept.release();  // the thread owns it now
}

HomeThread::~HomeThread() {
  bool ended = false;
  {
    std::unique_lock lock(work_->mutex);
    work_->ends = true;
    work_->changed.notify_all();
    ended = work_->changed.wait_for(lock, patience, [&] { return work_->over; });
  }
  ended ? pthread_join(thread_, nullptr) : pthread_detach(thread_);
  // Leaked on purpose: the thread may still use memory that must not be freed later.
  if (!ended && !is_freed_) new std::shared_ptr<Work>(work_);
}

void *HomeThread::run(void *kept) {
  const std::unique_ptr<std::shared_ptr<Work>> work(static_cast<std::shared_ptr<Work> *>(kept));
  serve(**work);
  return nullptr;
}

void HomeThread::serve(Work &work) {
  std::unique_lock lock(work.mutex);
  while (true) {
    work.changed.wait(lock, [&] { return work.ends || (work.begun > work.done && !work.error); });
    if (work.ends) break;
    const PageMove &transfer = work.transfers[work.done % capacity];
    lock.unlock();
    std::optional<Error> error = capture_error([&] { move(work, transfer); });
    lock.lock();
    work.error = std::move(error);
    ++work.done;
    work.changed.notify_all();
  }
  work.over = true;
  work.changed.notify_all();
}

void HomeThread::move(Work &work, const PageMove &transfer) {
  for (const HomePages &pages : transfer.pages)
    for (uint64_t done = 0; done < pages.bytes && !work.ends; done += file_piece_bytes) {
      const std::span<std::byte> piece(pages.memory + done, std::min(file_piece_bytes, pages.bytes - done));
      const bool whole = pages.offset % io_alignment == 0 && piece.size() % io_alignment == 0 &&
                         reinterpret_cast<uintptr_t>(pages.memory) % io_alignment == 0;
      std::byte *const there = work.file->data() + pages.offset + done;
      if (transfer.reads)
        whole ? work.file->read_pages(pages.offset + done, piece) : work.file->read(there, piece);
      else
        whole ? work.file->write_pages(pages.offset + done, piece) : work.file->write(there, piece);
    }
}

uint64_t HomeThread::begin(bool reads, std::span<const HomePages> pages) {
  const std::lock_guard lock(work_->mutex);
  if (work_->error) throw *work_->error;
  if (work_->begun - work_->done == capacity)
    fail(FSDP_INTERNAL, "more than {} transfers of the home file are under way", capacity);
  PageMove &transfer = work_->transfers[work_->begun % capacity];
  transfer.reads = reads;
  transfer.pages.assign(pages.begin(), pages.end());
  work_->changed.notify_all();
  return ++work_->begun;
}

bool HomeThread::done(uint64_t number) const {
  const std::lock_guard lock(work_->mutex);
  return work_->done >= number;
}

bool HomeThread::ended(uint64_t number) const {
  const std::lock_guard lock(work_->mutex);
  return work_->done >= number || work_->error;
}

bool HomeThread::wait_a_little(uint64_t number, std::chrono::milliseconds longest) {
  {
    std::unique_lock lock(work_->mutex);
    work_->changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return work_->done >= number || work_->error; });
    if (work_->error) throw *work_->error;
    if (work_->done >= number) return true;
  }
  const uint64_t bytes = work_->file->moved_bytes();
  if (motion_.number != number || motion_.bytes != bytes) motion_ = {number, bytes, Clock::now()};
  if (Clock::now() - motion_.since > longest)
    throw Error(FSDP_SYSTEM,
                format_text("{}: the disk has moved no byte for {} ms", work_->file->shown(), longest.count()),
                work_->file->rank(), FSDP_ORIGIN_OS, ETIMEDOUT);
  return false;
}

}  // namespace fsdp::engine
