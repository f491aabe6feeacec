// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/host_side_stream.h"

#include <cstring>

namespace fsdp::device::cuda {
namespace {

// What the stream's thread does for one wait. Copies: the event may be recorded again meanwhile.
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

}  // namespace fsdp::device::cuda
