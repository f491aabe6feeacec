// SPDX-License-Identifier: Apache-2.0
// Streams of the GPU, which map the interface to CUDA's calls and to the library's kernels. The caller's streams and
// the library's own streams differ in the steps before and after each piece of work.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "device/cuda/event.h"
#include "device/host/stream.h"

namespace fsdp::device::cuda {

// Device memory for kernels that need working memory.
class Scratch {
 public:
  Scratch(Core &core, const char *what);
  ~Scratch();
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  void *data() const noexcept { return data_; }

 private:
  Core &core_;
  void *data_ = nullptr;
};

class CudaStream : public Stream {
 public:
  CudaStream(const CudaStream &) = delete;
  CudaStream &operator=(const CudaStream &) = delete;

  void record(Event &event) override;
  void wait(const Event &event) override;
  void run(const Task &task) override;
  void copy(void *to, const void *from, size_t bytes) override;
  void fill(void *to, uint8_t byte, size_t bytes) override;
  void cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) override;
  void quantize_all_mxfp8(std::span<const Mxfp8Quantize> works, uint64_t *found) override;
  void quantize_all_fp8_blocks(std::span<const Fp8BlockQuantize> works, uint64_t *found) override;
  void swizzle_scales(const Mxfp8Swizzle &work) override;
  void find_all_amaxes(std::span<const AmaxSpan> spans) override;
  void find_fp8_scales(const Fp8Scales &work) override;
  void quantize_all_fp8(std::span<const Fp8Quantize> works) override;
  void add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) override;
  void scale_all(std::span<const FloatSpan> spans, float factor) override;
  void rank_sum(const RankSum &sum) override;
  void sum_all_squares(std::span<const SquaresSpan> spans) override;
  void sum_all_compact_squares(std::span<const CompactSquaresSpan> spans) override;
  void sum_values(double *result, const double *values, uint64_t count) override;
  void find_norm(Norm *norm, const NormShares &shares) override;
  void scale_all_by(std::span<const FloatSpan> spans, const float *factor) override;
  void count_nonfinite(uint64_t *result, const float *values, uint64_t count) override;
  void count_zeros(uint64_t *result, const float *values, uint64_t count) override;
  void adamw(const AdamW &step, std::span<const AdamWSpan> spans) override;
  void adamw_from(const AdamW *step, std::span<const AdamWSpan> spans) override;
  void compact_adamw(const AdamW &step, std::span<const CompactSpan> spans) override;
  void compact_adamw_from(const AdamW *step, std::span<const CompactSpan> spans) override;
  void store_step(AdamW *to, const AdamW &step) override;
  void round_randomly(const RandomRounding &work) override;
  uint64_t capture_id() const override;
  // Forgets the stream's last word, because other code may enqueue work on the stream through the handle.
  fsdp_stream handle() const noexcept override {
    forget_word();
    return stream_;
  }

  const std::string &name() const noexcept { return name_; }
  // The handle, for comparisons only: no work may be enqueued through it.
  cudaStream_t identity() const noexcept { return stream_; }
  // Makes later work start only after the word has reached `count`. Throws UNSUPPORTED in a capture.
  void wait_word(PinnedWord &word, uint32_t count);
  void check_outside_capture() const;

 protected:
  // `keeps_word`: no other work is enqueued on the stream, except by code that gets the handle.
  CudaStream(Core &core, cudaStream_t stream, std::string name, bool keeps_word = false)
      : core_(core), stream_(stream), name_(std::move(name)), keeps_word_(keeps_word) {}
  // Called when work or a wait is enqueued after the last word.
  void forget_word() const noexcept { last_word_.reset(); }
  virtual void before() {}  // called before each piece of work, each record, and the work that follows a wait
  virtual void after() {}   // called after each piece of work
  // Calls launch() with scratch memory that kernels of no other stream use at the same time.
  virtual void with_scratch(const std::function<void(void *scratch)> &launch) = 0;
  template <class Call>
  void enqueue(const char *call, const Call &work);  // work() returns CUDA's error

  Core &core_;
  cudaStream_t stream_;
  std::string name_;

 private:
  const bool keeps_word_;
  mutable std::optional<AwaitedWord> last_word_;  // the last word, if nothing was enqueued on the stream since then
};

// A stream that the library has made. It is not ordered with the legacy stream. It has the highest priority, because
// other streams wait for its work. Without overlap its work is done when the call returns (except in a graph capture).
class LibraryStream final : public CudaStream, private WorkSource {
 public:
  LibraryStream(Core &core, const std::string &name);
  // Waits until the enqueued work is done, while the core's patience lasts.
  ~LibraryStream() override;
  void record(Event &event) override;
  // Must be called before any work that could wait for this rank runs on the GPU: see prepare.cpp. When it returns, the
  // kernels are loaded.
  void load_kernels();

 protected:
  void before() override;
  void after() override;
  void with_scratch(const std::function<void(void *scratch)> &launch) override;

 private:
  bool mark() noexcept override;
  bool is_known_to_be_done() noexcept;

  Scratch scratch_;
  CudaEvent last_;
  Delay delay_;
};

// The program's streams, as the library uses them during a call.

class CallerStreams;

// Wraps a cudaStream_t that the program owns; NULL is the legacy default stream. Only the handle's value is remembered,
// so the program may destroy the stream after the call.
class CallerStream final : public CudaStream {
 public:
  CallerStream(Core &core, CallerStreams &streams) : CudaStream(core, nullptr, {}), streams_(streams), last_(core) {}
  void point_at(cudaStream_t stream);
  cudaStream_t stream() const noexcept { return stream_; }
  const CudaEvent &last() const noexcept { return last_; }

 protected:
  void after() override;
  void with_scratch(const std::function<void(void *scratch)> &launch) override;

 private:
  CallerStreams &streams_;
  CudaEvent last_;  // recorded behind the library's last work, so that memory in use is not given back
};

// A fixed number of wrappers. A new stream gets the wrapper that has been unused for the longest time.
class CallerStreams final : private WorkSource {
 public:
  explicit CallerStreams(Core &core);
  ~CallerStreams();
  CallerStreams(const CallerStreams &) = delete;
  CallerStreams &operator=(const CallerStreams &) = delete;
  CallerStream &at(cudaStream_t stream);

 private:
  bool mark() noexcept override { return true; }  // each wrapper already has an event behind its work

  friend class CallerStream;
  static constexpr size_t capacity = 32;
  struct KeptStream {
    std::unique_ptr<CallerStream> stream;
    uint64_t used = 0;
  };

  Core &core_;
  Scratch scratch_;  // shared by all wrappers, which use it in turn
  CudaEvent scratch_free_;
  std::array<KeptStream, capacity> slots_;
  uint64_t clock_ = 0;
};

}  // namespace fsdp::device::cuda
