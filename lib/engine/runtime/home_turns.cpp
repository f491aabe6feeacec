// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/home_turns.h"

#include <algorithm>
#include <cerrno>

#include "base/library_thread.h"
#include "memory/home_plan.h"

namespace fsdp::engine {
namespace {

// Pieces are short, so that a slow disk is seen to move, and a thread that is to end need not finish its segment.
constexpr uint64_t piece_bytes = uint64_t{8} << 20;
// How long the destructor waits for a thread that the disk holds.
constexpr std::chrono::milliseconds patience{1000};

template <bool reads>
void transfer(HomeFile &file, const HomePart &part, const std::atomic<bool> &ends) {
  for (uint64_t done = 0; done < part.bytes && !ends; done += piece_bytes) {
    const std::span<std::byte> piece(part.memory + done, std::min(piece_bytes, part.bytes - done));
    if constexpr (reads)
      file.read_pages(part.offset + done, piece);
    else
      file.write_pages(part.offset + done, piece);
  }
}

}  // namespace

HomeTurns::HomeTurns(Runtime &runtime)
    : runtime_(runtime), work_(std::make_shared<FileWork>()), updated_(runtime.context.device().create_event()) {
  const Region &region = runtime.storage->region(memory::RegionId::turns);
  const uint32_t turns = runtime.spec.homes.turns;
  memory_ = region.data;
  turn_bytes_ = runtime.plan.region(memory::RegionId::turns).bytes / turns;
  work_->file = runtime.storage->home_file();
  work_->memory = region.memory;
  work_->turns.resize(turns);
  threads_[0] = start<true>();
  try {
    threads_[1] = start<false>();
  } catch (...) {
    {
      const std::lock_guard lock(work_->mutex);
      work_->ends = true;
      work_->changed.notify_all();
    }
    pthread_join(threads_[0], nullptr);
    throw;
  }
}

HomeTurns::~HomeTurns() {
  bool ended = false;
  {
    std::unique_lock lock(work_->mutex);
    work_->ends = true;
    work_->changed.notify_all();
    ended = work_->changed.wait_for(lock, patience, [&] { return work_->threads == 0; });
  }
  for (const pthread_t thread : threads_) ended ? pthread_join(thread, nullptr) : pthread_detach(thread);
  // Memory of a GPU's runtime cannot be freed after the device, so that of a thread that is left behind is never freed.
  if (!ended && !runtime_.context.device_traits().host_memory) new std::shared_ptr<FileWork>(work_);
}

template <bool reads>
pthread_t HomeTurns::start() const {
  auto kept = std::make_unique<std::shared_ptr<FileWork>>(work_);
  ++work_->threads;
  try {
    const LibraryThread thread{reads ? "fsdp-home-read" : "fsdp-home-write", "the home file"};
    const pthread_t started = thread.start(run<reads>, kept.get());
    kept.release();  // the thread owns it now
    return started;
  } catch (...) {
    --work_->threads;
    throw;
  }
}

template <bool reads>
void *HomeTurns::run(void *kept) {
  const std::unique_ptr<std::shared_ptr<FileWork>> work(static_cast<std::shared_ptr<FileWork> *>(kept));
  serve<reads>(**work);
  return nullptr;
}

template <bool reads>
void HomeTurns::serve(FileWork &work) {
  uint64_t &done = reads ? work.read : work.written;
  const uint64_t &given = reads ? work.given : work.updated;
  std::unique_lock lock(work.mutex);
  while (true) {
    work.changed.wait(lock, [&] { return work.ends || (given > done && !work.error); });
    if (work.ends) break;
    const HomeView &view = work.turns[done % work.turns.size()];
    lock.unlock();
    std::optional<Error> error;
    if (reads || view.segment.writes)
      error = capture_error([&] {
        for (const HomePart &part : view.parts)
          if (reads || part.plane->plan->kind != PlaneKind::grad) transfer<reads>(*work.file, part, work.ends);
      });
    lock.lock();
    if (error && !work.error) work.error = std::move(error);
    ++done;
    work.changed.notify_all();
  }
  --work.threads;
  work.changed.notify_all();
}

// Places the pages of the segment's planes one after the other in the turn.
void HomeTurns::fill(HomeView &view, const HomeSegment &segment, std::byte *memory) const {
  view.segment = segment;
  view.parts.clear();
  uint64_t end = 0;
  for (const Plane &plane : segment.bucket->planes) {
    if (plane.plan->again || !work_->file->contains(plane.data) || !takes_(*plane.plan)) continue;
    const uint64_t begin = work_->file->offset_of(plane.element(segment.begin));
    const uint64_t bytes = (segment.end - segment.begin) * dtype_size(plane.dtype());
    const uint64_t offset = page_of(begin);
    view.parts.push_back({&plane, offset, round_up(begin + bytes, io_alignment) - offset, memory + end});
    end += view.parts.back().bytes;
  }
  if (end > turn_bytes_)
    fail(FSDP_INTERNAL, "a segment of the home file needs {} bytes of a turn of {}", end, turn_bytes_);
}

void HomeTurns::give_segments() {
  const std::lock_guard lock(work_->mutex);
  while (work_->given - first_ < segments_.size() && work_->given - work_->written < work_->turns.size()) {
    std::byte *const memory = memory_ + work_->given % work_->turns.size() * turn_bytes_;
    fill(turn(work_->given), segments_[work_->given - first_], memory);
    ++work_->given;
  }
  work_->changed.notify_all();
}

void HomeTurns::begin(std::span<const HomeSegment> segments, Takes takes) {
  segments_ = segments, takes_ = takes;
  first_ = next_ = work_->given;
  give_segments();
}

const HomeView *HomeTurns::next(device::Stream &caller) {
  if (next_ > first_) {
    caller.record(*updated_);
    runtime_.context.device().synchronize(*updated_);
  }
  {
    const std::lock_guard lock(work_->mutex);
    work_->updated = next_;
    work_->changed.notify_all();
  }
  if (next_ - first_ == segments_.size()) {
    await([&] { return work_->written == next_; });
    return nullptr;
  }
  give_segments();
  // With the smallest number of turns the segment may need the turn of one that is still being written.
  if (work_->given == next_) {
    await([&] { return work_->given - work_->written < work_->turns.size(); });
    give_segments();
  }
  await([&] { return work_->read > next_; });
  return &turn(next_++);
}

template <class Done>
void HomeTurns::await(Done done) {
  using Clock = std::chrono::steady_clock;
  const auto is_done = [&] { return done() || work_->error; };
  std::unique_lock lock(work_->mutex);
  if (!is_done()) {
    const WaitSpan span(runtime_, WaitKind::home);
    const std::chrono::milliseconds longest(runtime_.context.timeout_ms());
    uint64_t moved = UINT64_MAX;
    Clock::time_point since = Clock::now();
    while (!work_->changed.wait_for(lock, std::chrono::milliseconds(20), is_done)) {
      lock.unlock();
      runtime_.context.waiter().poll();
      const uint64_t now = work_->file->read_bytes() + work_->file->written_bytes();
      if (now != moved) moved = now, since = Clock::now();
      if (Clock::now() - since > longest)
        throw Error(FSDP_SYSTEM,
                    format_text("{}: the disk has moved no byte for {} ms", work_->file->shown(), longest.count()),
                    static_cast<int32_t>(runtime_.context.rank()), FSDP_ORIGIN_OS, ETIMEDOUT);
      lock.lock();
    }
  }
  if (work_->error) throw *work_->error;
}

}  // namespace fsdp::engine
