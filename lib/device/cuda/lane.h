// SPDX-License-Identifier: Apache-2.0
// Host work between pieces of GPU work. The lane's thread asks CUDA for events and nothing more. Host functions on
// streams would run one after the other on one thread of CUDA's, and wait there for peers.
//
// Without overlap the lane works on the calling thread, and everything that a call asks for is done when it returns.
//
// GPU to host: the lane's thread polls the word that the stream writes at the event's record. Host to GPU: the number
// of pieces that the lane has done stands in a pinned word too, and a stream waits until it is large enough
// (cuStreamWaitValue32). Pieces that are skipped since the context has failed count as well, so the GPU always goes on.
//
// CUDA does not know of these waits, and puts streams into common hardware queues as it likes, where what waits holds
// up what any stream was given later. One rank enqueues each piece after those that it depends on, so that its queues
// wait in an order that comes to an end. Two ranks do not: where contexts of one process have lanes on one GPU, the
// calling thread waits in place of the stream, and all that is enqueued there ends by itself.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "device/cuda/event.h"
#include "device/cuda/stream.h"
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

// A context that has lanes on a GPU, among those of this process.
class LaneOwner {
 public:
  explicit LaneOwner(Core &core) noexcept;
  ~LaneOwner();
  LaneOwner(const LaneOwner &) = delete;
  LaneOwner &operator=(const LaneOwner &) = delete;
  // Is there another one?
  bool shares_gpu() const noexcept;

 private:
  Core &core_;
};

class CudaLane final : public HostLane {
 public:
  CudaLane(Core &core, const std::string &name, Progress &progress);
  // Finishes what the lane was given, or skips it if the context has failed, and sees the GPU past its waits.
  ~CudaLane() override;
  CudaLane(const CudaLane &) = delete;
  CudaLane &operator=(const CudaLane &) = delete;

  Stream &stream() override { return *stream_; }
  void wait(const Event &event) override { stream_->wait(event); }
  void release(Stream &device_stream) override;

 private:
  // Behind the last release of each stream, so that the word is not given back while the GPU reads it.
  struct Passed {
    cudaStream_t stream = nullptr;
    std::unique_ptr<CudaEvent> event;
  };
  CudaEvent &passed(cudaStream_t stream);

  Core &core_;
  LaneOwner owner_;
  PinnedWord *word_ = nullptr;
  uint32_t from_ = 0;  // what it was at first
  std::array<Passed, 4> passed_;
  uint32_t unseen_ = 0;  // waits of the program's streams for the word that no event is behind
  size_t next_ = 0;      // to be taken for a new stream
  std::unique_ptr<HostSideStream> stream_;
};

}  // namespace fsdp::device::cuda
