// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "device/cuda/event.h"
#include "device/host/stream.h"

namespace fsdp::device::cuda {

// A stream of the host that records and waits for the events of a CUDA device, so that one kind of event serves
// everywhere.
class HostSideStream final : public HostStream {
 public:
  // threaded: does it work on a thread of its own, or on the calling one?
  HostSideStream(Core &core, std::unique_ptr<HostStream> stream, bool threaded)
      : HostStream(stream->is_calling_thread()), core_(core), stream_(std::move(stream)), threaded_(threaded) {}
  void record(Event &event) override;
  void wait(const Event &event) override;
  void run(const Task &task) override { stream_->run(task); }
  // What it has been given so far.
  HostEvent point();

 private:
  Core &core_;
  std::unique_ptr<HostStream> stream_;
  const bool threaded_;
};

}  // namespace fsdp::device::cuda
