// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/event.h"

#include <cstdio>
#include <utility>

namespace fsdp::device::cuda {

CudaEvent::CudaEvent(Core &core)
    : core_(core),
      word_(core.words.take()),
      count_(word_->value.load(std::memory_order_relaxed)),
      awaited_{word_, count_} {
  try {
    const ObjectScope scope(core);
    core.check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags", "an event");
  } catch (...) {
    core.words.give_back(word_);
    throw;
  }
}

// CUDA may wait for an event that is not done when it is destroyed.
CudaEvent::~CudaEvent() {
  const bool past = written();
  core_.words.give_back(word_);
  if (past)
    core_.give_back_now({Remnant::event, event_});
  else
    core_.keep({Remnant::event, event_});
  core_.give_back_now({Remnant::event, captured_event_});
}

bool CudaEvent::done() const noexcept {
  if (on_host()) return host_.done();
  return capture() == 0 && written();
}

// CUDA's event is recorded behind the word, so a stream that waits for the event also comes after the word.
AwaitedWord CudaEvent::record(cudaStream_t stream, uint64_t capture, const std::string &stream_name,
                              const AwaitedWord *known) {
  if (capture == 0) {
    mark(stream, stream_name, known);
    on_host_ = false;
  }
  cudaEvent_t event = capture == 0 ? event_ : captured_event();
  if (capture == 0) behind_ = true;  // remains true if CUDA refuses the event, because its word is enqueued already
  core_.check(cudaEventRecord(event, stream), "cudaEventRecord", stream_name);
  if (capture == 0) behind_ = false;
  capture_ = capture;
  std::snprintf(stream_name_, sizeof stream_name_, "%s", stream_name.c_str());
  return awaited_;
}

// A later record on another stream is ordered after the earlier record, because otherwise the two streams could write
// the word in either order.
void CudaEvent::mark(cudaStream_t stream, const std::string &stream_name, const AwaitedWord *known) {
  const bool moves = stream != stream_ && !written();
  if (moves) enqueue_wait_outside(stream, stream_name);
  if (known && !moves)
    awaited_ = *known;
  else
    write(stream, stream_name);
  stream_ = stream;
}

void CudaEvent::write(cudaStream_t stream, const std::string &stream_name) {
  if (count_ >= PinnedWord::most) {
    PinnedWord *next = core_.words.take();
    core_.words.give_back(std::exchange(word_, next));
    count_ = next->value.load(std::memory_order_relaxed);
  }
  core_.check(core_.driver.stream_write_value(stream, word_->address(), count_ + 1, CU_STREAM_WRITE_VALUE_DEFAULT),
              "cuStreamWriteValue32", stream_name);
  word_->expect(++count_);
  awaited_ = {word_, count_};
}

cudaEvent_t CudaEvent::captured_event() {
  if (captured_event_) return captured_event_;
  const ObjectScope scope(core_);
  core_.check(cudaEventCreateWithFlags(&captured_event_, cudaEventDisableTiming), "cudaEventCreateWithFlags",
              "an event of a graph capture");
  return captured_event_;
}

void CudaEvent::enqueue_wait(cudaStream_t stream, const std::string &stream_name) const {
  if (capture() == 0) return enqueue_wait_outside(stream, stream_name);
  core_.check(cudaStreamWaitEvent(stream, captured_event_, 0), "cudaStreamWaitEvent", stream_name);
}

// If CUDA's event still belongs to the previous record, a stream that waits for the event would continue too early.
void CudaEvent::enqueue_wait_outside(cudaStream_t stream, const std::string &stream_name) const {
  if (behind_)
    core_.check(
        core_.driver.stream_wait_value(stream, awaited_.word->address(), awaited_.count, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32", stream_name);
  else
    core_.check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent", stream_name);
}

void CudaEvent::set_host(const HostEvent &host) noexcept {
  host_ = host;
  on_host_ = true;
  capture_ = 0;
}

void fail_captured(std::string_view stream_name) {
  fail(FSDP_UNSUPPORTED,
       "{} is being captured into a graph, and what moves through memory of the host (staging, UCX) cannot be part of "
       "one: use "
       "NCCL for what is captured",
       stream_name);
}

void await_event(const CudaEvent &event, const Core &core, const Waiter &waiter) {
  if (event.on_host()) return device::await_event(event.host(), waiter);
  if (event.capture() != 0)
    fail(FSDP_INVALID_STATE,
         "{} waits for work of stream '{}' that a graph capture has recorded and that no launch has begun",
         waiter.call_text(), event.stream_name());
  if (!event.done()) await_word(event.word(), event.count(), event.stream_name(), core, waiter);
  waiter.failure().check();
}

bool await_last(const CudaEvent &event, Core &core) noexcept {
  if (event.on_host() || event.capture() != 0) return event.done();
  if (await_word(event.word(), event.count(), core, core.patience_ms())) return true;
  core.lose_patience();
  return false;
}

}  // namespace fsdp::device::cuda
