// SPDX-License-Identifier: Apache-2.0
// Host work between pieces of GPU work. The lane's thread only queries CUDA's events. CUDA's own host functions are not
// used, because they would run one after the other on one thread of CUDA, and wait there for peers.
//
// Without overlap the lane works on the calling thread, and its work is done when a call returns.
//
// From GPU to host: the lane's thread polls the word that the stream writes at the event's record. From host to GPU:
// the number of pieces that the lane has done is also in a pinned word, and a stream waits until it is large enough
// (cuStreamWaitValue32). Pieces that are skipped because the context has failed count, too, so the GPU always
// continues.
//
// CUDA does not know of these waits. It may put several streams into one hardware queue, where waiting work blocks the
// later work of any stream. One rank enqueues each piece after the pieces that it depends on, so the waits of its
// queues end. Two ranks have no such order. So if contexts of one process have lanes on the same GPU, the calling
// thread waits instead of the stream, and the enqueued work never waits for the host.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "device/cuda/event.h"
#include "device/cuda/stream.h"
#include "device/host/stream.h"

namespace fsdp::device::cuda {

// A stream of the host that records and waits for the events of a CUDA device, so that one kind of event is enough
// everywhere.
class HostSideStream final : public HostStream {
 public:
  // `threaded`: the stream works on its own thread; if false, on the calling thread.
  HostSideStream(Core &core, std::unique_ptr<HostStream> stream, bool threaded)
      : HostStream(stream->is_calling_thread()), core_(core), stream_(std::move(stream)), threaded_(threaded) {}
  void record(Event &event) override;
  void wait(const Event &event) override;
  void run(const Task &task) override { stream_->run(task); }
  // Returns the point behind all work enqueued so far.
  HostEvent point();

 private:
  Core &core_;
  std::unique_ptr<HostStream> stream_;
  const bool threaded_;
};

// Counts the contexts of this process that have lanes on the GPU.
class LaneOwner {
 public:
  explicit LaneOwner(Core &core) noexcept;
  ~LaneOwner();
  LaneOwner(const LaneOwner &) = delete;
  LaneOwner &operator=(const LaneOwner &) = delete;
  // Does another context have lanes on the GPU?
  bool shares_gpu() const noexcept;

 private:
  Core &core_;
};

class CudaLane final : public HostLane {
 public:
  CudaLane(Core &core, const std::string &name, Progress &progress);
  // Finishes the lane's work, or skips it if the context has failed, and waits until the GPU has passed the waits for
  // this lane.
  ~CudaLane() override;
  CudaLane(const CudaLane &) = delete;
  CudaLane &operator=(const CudaLane &) = delete;

  Stream &stream() override { return *stream_; }
  void wait(const Event &event) override { stream_->wait(event); }
  void release(Stream &device_stream) override;

 private:
  // An event behind the last release of a stream, so that the word is not given back while the GPU reads it.
  struct Passed {
    cudaStream_t stream = nullptr;
    std::unique_ptr<CudaEvent> event;
  };
  CudaEvent &passed(cudaStream_t stream);

  Core &core_;
  LaneOwner owner_;
  PinnedWord *word_ = nullptr;
  uint32_t from_ = 0;  // the first value of the word
  std::array<Passed, 4> passed_;
  uint32_t unseen_ = 0;  // number of waits of the program's streams for the word that have no event behind them
  size_t next_ = 0;      // index in passed_ for the next new stream
  std::unique_ptr<HostSideStream> stream_;
};

}  // namespace fsdp::device::cuda
