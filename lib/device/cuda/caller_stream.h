// SPDX-License-Identifier: Apache-2.0
// The program's streams, as the library uses them during a call.
#pragma once

#include <array>
#include <memory>

#include "device/cuda/stream.h"

namespace fsdp::device::cuda {

class CallerStreams;

// Wraps a cudaStream_t that the program owns; NULL is the legacy default stream. Nothing is remembered of the handle
// but its value: the program may destroy the stream after the call.
class CallerStream final : public CudaStream {
 public:
  CallerStream(Core &core, CallerStreams &streams) : CudaStream(core, nullptr, {}), streams_(streams), last_(core) {}
  void point_at(cudaStream_t stream);
  cudaStream_t stream() const noexcept { return stream_; }
  const CudaEvent &last() const noexcept { return last_; }

 protected:
  void after() override;
  void sum_squares_in(std::span<const SquaresSpan> spans) override;

 private:
  CallerStreams &streams_;
  CudaEvent last_;  // behind the library's last work, so that memory is not given back under it
};

// A fixed number of wrappers; the one unused for longest is pointed at the next new stream.
class CallerStreams final : private WorkSource {
 public:
  explicit CallerStreams(Core &core);
  ~CallerStreams();
  CallerStreams(const CallerStreams &) = delete;
  CallerStreams &operator=(const CallerStreams &) = delete;
  CallerStream &at(cudaStream_t stream);

 private:
  bool mark() noexcept override { return true; }  // each has its event behind its work

  friend class CallerStream;
  static constexpr size_t capacity = 32;
  struct KeptStream {
    std::unique_ptr<CallerStream> stream;
    uint64_t used = 0;
  };

  Core &core_;
  Scratch scratch_;  // one for all, used in turn
  CudaEvent scratch_free_;
  std::array<KeptStream, capacity> slots_;
  uint64_t clock_ = 0;
};

}  // namespace fsdp::device::cuda
