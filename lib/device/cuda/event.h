// SPDX-License-Identifier: Apache-2.0
// A point in the order of a stream of the GPU, or of a lane's host stream.
#pragma once

#include <string>

#include "device/cuda/core.h"
#include "device/host/progress.h"

namespace fsdp::device::cuda {

// Besides CUDA's event, which streams wait for, each has a word that the stream writes when it comes to the record. So
// the host sees it done without a call into CUDA, also on threads that must make none, and a wait for one record is not
// moved by a later one. In a graph capture nothing is written: the record then is a point of the graph, not of time. It
// has a CUDA event of its own, so that the last record outside is what it was when the capture has ended.
//
// A word costs its stream ten times as much as CUDA's event (1.6 and 0.15 us on an H100). So where a stream has had no
// work since the last word, a record takes that one: words only grow, and live as long as the device.
class CudaEvent final : public Event {
 public:
  static constexpr size_t name_bytes = 48;

  explicit CudaEvent(Core &core);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent &) = delete;
  CudaEvent &operator=(const CudaEvent &) = delete;

  // Never true for a point of the capture under way. One of a capture that has ended is as if it had not been made.
  bool done() const noexcept override;

  // Enqueues the record. The stream's name is copied, cut where it is long. known: a word that nothing on the stream is
  // behind; NULL: there is none. Returns the one that stands for this record, outside of captures.
  AwaitedWord record(cudaStream_t stream, uint64_t capture, const std::string &stream_name,
                     const AwaitedWord *known = nullptr);
  // What follows on the stream comes after the record.
  void enqueue_wait(cudaStream_t stream, const std::string &stream_name) const;

  bool on_host() const noexcept { return on_host_ && capture() == 0; }
  const HostEvent &host() const noexcept { return host_; }
  void set_host(const HostEvent &host) noexcept;
  // The capture under way that it is a point of; 0: none.
  uint64_t capture() const noexcept {
    return capture_ == core_.live_capture.load(std::memory_order_relaxed) ? capture_ : 0;
  }
  const PinnedWord &word() const noexcept { return *awaited_.word; }
  uint32_t count() const noexcept { return awaited_.count; }
  cudaEvent_t handle() const noexcept { return event_; }  // of the last record outside of captures
  const char *stream_name() const noexcept { return stream_name_; }

 private:
  void mark(cudaStream_t stream, const std::string &stream_name, const AwaitedWord *known);
  void write(cudaStream_t stream, const std::string &stream_name);
  cudaEvent_t captured_event();
  void enqueue_wait_outside(cudaStream_t stream, const std::string &stream_name) const;
  bool written() const noexcept { return awaited_.written(); }

  Core &core_;
  cudaEvent_t event_ = nullptr;           // of the last record outside of captures
  cudaEvent_t captured_event_ = nullptr;  // of the last one in one, if there ever was
  PinnedWord *word_;                      // its own
  uint32_t count_;                        // that streams were told to write there last
  AwaitedWord awaited_;                   // reached when the last record outside of captures is done
  uint64_t capture_ = 0;                  // of the last record
  cudaStream_t stream_ = nullptr;         // of the last record outside of captures
  bool behind_ = false;   // CUDA refused the last record outside, whose word a stream writes all the same
  bool on_host_ = false;  // the last one outside was on a stream of the host
  HostEvent host_;
  char stream_name_[name_bytes] = "a stream";
};

inline CudaEvent &cuda_event(Event &event) { return static_cast<CudaEvent &>(event); }
inline const CudaEvent &cuda_event(const Event &event) { return static_cast<const CudaEvent &>(event); }

// Blocks the calling thread until the event is done. INVALID_STATE for a point of a capture.
void await_event(const CudaEvent &event, const Core &core, const Waiter &waiter);

// UNSUPPORTED: host work in a capture.
[[noreturn]] void fail_captured(std::string_view stream_name);

// For destructors: waits for as long as the core's patience lasts, whether the context has failed or not; returns
// whether it is done.
bool await_last(const CudaEvent &event, Core &core) noexcept;

}  // namespace fsdp::device::cuda
