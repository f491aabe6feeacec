// SPDX-License-Identifier: Apache-2.0

#include "device/cuda/lane.h"

#include <algorithm>
#include <cstring>

#include "device/host/stream.h"

namespace fsdp::device::cuda {

namespace {

// One wait of the stream's thread. It has copies, because the event may be recorded again during the wait.
struct WordWait {
  const PinnedWord *word;
  const Core *core;
  cudaEvent_t event;
  uint32_t count;
  char stream_name[CudaEvent::name_bytes];
  void operator()() const { await_word(*word, count, stream_name, *core, core->worker_waiter, event); }
};

}  // namespace

HostEvent HostSideStream::point() {
  HostEvent now;
  stream_->record(now);
  return now;
}

void HostSideStream::record(Event &event) { cuda_event(event).set_host(point()); }

void HostSideStream::wait(const Event &event) {
  const CudaEvent &other = cuda_event(event);
  if (other.capture() != 0) fail_captured(other.stream_name());
  if (other.done()) return;
  if (!threaded_) return await_event(other, core_, core_.waiter);
  if (other.on_host()) return stream_->wait(other.host());
  WordWait wait{&other.word(), &core_, other.handle(), other.count(), {}};
  std::memcpy(wait.stream_name, other.stream_name(), sizeof wait.stream_name);
  stream_->run(wait);
}

namespace {

// For each GPU, the number of contexts with lanes on it. If there are more GPUs than places, some threads wait
// needlessly.
std::atomic<uint32_t> &owners_on(int gpu) {
  static std::array<std::atomic<uint32_t>, 64> owners{};
  return owners[static_cast<size_t>(gpu) % owners.size()];
}

}  // namespace

LaneOwner::LaneOwner(Core &core) noexcept : core_(core) {
  if (core.lanes.fetch_add(1) == 0) ++owners_on(core.index);
}

LaneOwner::~LaneOwner() {
  if (core_.lanes.fetch_sub(1) == 1) --owners_on(core_.index);
}

bool LaneOwner::shares_gpu() const noexcept { return owners_on(core_.index).load() > 1; }

CudaLane::CudaLane(Core &core, const std::string &name, Progress &progress) : core_(core), owner_(core) {
  for (Passed &passed : passed_) passed.event = std::make_unique<CudaEvent>(core);
  std::unique_ptr<HostStream> work;
  if (core.options.overlap) {
    word_ = core.words.take();
    from_ = word_->value.load(std::memory_order_relaxed);  // never lowered: events may share its earlier counts
    progress.mirror(&word_->value, from_);
    work = std::make_unique<WorkerStream>(core.options, name, progress, core.waiter, core.worker_waiter, core.failure);
  } else {
    work = std::make_unique<InlineStream>(core.options, name, core.waiter, core.failure);
  }
  stream_ = std::make_unique<HostSideStream>(core, std::move(work), core.options.overlap);
}

// A word for which streams still wait is not reused. It is given back when these streams have passed the wait.
CudaLane::~CudaLane() {
  stream_.reset();
  if (!word_) return;
  const auto past = [&](const Passed &passed) { return await_last(*passed.event, core_); };
  if (unseen_)
    core_.words.abandon(word_);
  else if (std::all_of(passed_.begin(), passed_.end(), past))
    core_.words.give_back(word_);
}

// The event is needed only for giving the word back, so a stream needs only one event for many releases.
void CudaLane::release(Stream &device_stream) {
  auto *stream = dynamic_cast<CudaStream *>(&device_stream);
  if (!stream) fail(FSDP_INTERNAL, "a lane was to release a stream that is not one of GPU {}", core_.index);
  const HostEvent so_far = stream_->point();
  if (!word_ || so_far.done()) return stream->check_outside_capture();
  if (owner_.shares_gpu()) {
    stream->check_outside_capture();
    return device::await_event(so_far, core_.waiter);
  }
  stream->wait_word(*word_, from_ + static_cast<uint32_t>(so_far.count()));
  const bool marked_at_the_end = dynamic_cast<LibraryStream *>(stream) != nullptr;
  unseen_ += !marked_at_the_end;
  stream->record(passed(stream->identity()));
  unseen_ -= !marked_at_the_end;
}

CudaEvent &CudaLane::passed(cudaStream_t stream) {
  auto found = std::find_if(passed_.begin(), passed_.end(), [=](const Passed &p) { return p.stream == stream; });
  if (found == passed_.end()) {
    found = passed_.begin() + static_cast<ptrdiff_t>(next_++ % passed_.size());
    found->stream = stream;
  }
  return *found->event;
}

}  // namespace fsdp::device::cuda
