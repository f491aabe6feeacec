// SPDX-License-Identifier: Apache-2.0
// An event of the CUDA device: a point in the order of a stream of the GPU, or of a lane's host stream.
#pragma once

#include <string>

#include "device/cuda/core.h"
#include "device/host/progress.h"

namespace fsdp::device::cuda {

// Each event has a CUDA event, for which streams wait, and a word, which the stream writes when it reaches the record.
// So the host sees that the record is done without a call of CUDA, even on threads that must not call CUDA. A wait for
// one record is not affected by a later record. In a graph capture no word is written, because the record is a point of
// the graph and not of time. Such a record uses a second CUDA event, so after the capture the last record outside of
// captures is valid again.
//
// Writing a word costs a stream ten times as much as recording CUDA's event (1.6 and 0.15 us on an H100). So if a
// stream has had no work since its last word, a record uses that word again. This is possible because words only grow,
// and exist as long as the device.
class CudaEvent final : public Event {
 public:
  static constexpr size_t name_bytes = 48;

  explicit CudaEvent(Core &core);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent &) = delete;
  CudaEvent &operator=(const CudaEvent &) = delete;

  // Never true for a record in the capture that is under way. A record in a capture that has ended does not count.
  bool done() const noexcept override;

  // Enqueues the record. The stream's name is copied, and cut if it is long. `known` is the stream's last word if the
  // stream has had no work since then, else NULL. Outside of captures, returns the word that stands for this record.
  AwaitedWord record(cudaStream_t stream, uint64_t capture, const std::string &stream_name,
                     const AwaitedWord *known = nullptr);
  // Orders work that is enqueued later on the stream after the record.
  void enqueue_wait(cudaStream_t stream, const std::string &stream_name) const;

  bool on_host() const noexcept { return on_host_ && capture() == 0; }
  const HostEvent &host() const noexcept { return host_; }
  void set_host(const HostEvent &host) noexcept;
  // The current capture if the event was recorded in it; 0: there is none.
  uint64_t capture() const noexcept {
    return capture_ == core_.live_capture.load(std::memory_order_relaxed) ? capture_ : 0;
  }
  const PinnedWord &word() const noexcept { return *awaited_.word; }
  uint32_t count() const noexcept { return awaited_.count; }
  cudaEvent_t handle() const noexcept { return event_; }  // CUDA's event of the last record outside of captures
  const char *stream_name() const noexcept { return stream_name_; }

 private:
  void mark(cudaStream_t stream, const std::string &stream_name, const AwaitedWord *known);
  void write(cudaStream_t stream, const std::string &stream_name);
  cudaEvent_t captured_event();
  void enqueue_wait_outside(cudaStream_t stream, const std::string &stream_name) const;
  bool written() const noexcept { return awaited_.written(); }

  Core &core_;
  cudaEvent_t event_ = nullptr;           // CUDA's event of the last record outside of captures
  cudaEvent_t captured_event_ = nullptr;  // CUDA's event of the last record in a capture, if there ever was one
  PinnedWord *word_;                      // this event's own word
  uint32_t count_;                        // the last count that streams will write to word_
  AwaitedWord awaited_;                   // reached when the last record outside of captures is done
  uint64_t capture_ = 0;                  // capture of the last record; 0: none
  cudaStream_t stream_ = nullptr;         // stream of the last record outside of captures
  bool behind_ = false;   // CUDA refused the last record outside of captures, but a stream still writes its word
  bool on_host_ = false;  // the last record outside of captures was on a stream of the host
  HostEvent host_;
  char stream_name_[name_bytes] = "a stream";
};

inline CudaEvent &cuda_event(Event &event) { return static_cast<CudaEvent &>(event); }
inline const CudaEvent &cuda_event(const Event &event) { return static_cast<const CudaEvent &>(event); }

// Blocks the calling thread until the event is done. Throws INVALID_STATE for a point of a capture.
void await_event(const CudaEvent &event, const Core &core, const Waiter &waiter);

// Throws UNSUPPORTED for host work in a capture.
[[noreturn]] void fail_captured(std::string_view stream_name);

// For destructors: waits while the core's patience lasts, whether the context has failed or not. Returns whether the
// event is done.
bool await_last(const CudaEvent &event, Core &core) noexcept;

}  // namespace fsdp::device::cuda
