// SPDX-License-Identifier: Apache-2.0
// What the engine and the communicators may ask of a device. Backends: host/ and cuda/; which one is decided in
// factory.cpp alone. Everything that is enqueued on a stream must stay valid until the stream has done it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "base/failure.h"
#include "device/quantize.h"
#include "device/work.h"
#include "fsdp.h"

namespace fsdp::device {

// A point in a stream's order. Reusable and allocation-free after creation; one that was never recorded is done.
// Recorded on a stream of a GPU while its last record, on another one, is not done, it orders that stream after the
// other.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() const noexcept = 0;
};

// A host function in the order of a stream of the host, copied into the stream's own queue: trivially copyable, at most
// `capacity` bytes. It may wait (bounded) and may throw Error: the stream then fails its context and skips what
// follows.
class Task {
 public:
  static constexpr size_t capacity = 240;

  template <class F>
  requires(std::is_trivially_copyable_v<F> && sizeof(F) <= capacity && alignof(F) <= 16) Task(const F &function)
      : call_([](void *state) { (*static_cast<F *>(state))(); }) {  // NOLINT: implicit on purpose
    std::memcpy(state_, &function, sizeof(F));
  }
  Task() = default;
  void operator()() { call_(state_); }

 private:
  void (*call_)(void *) = nullptr;
  alignas(16) std::byte state_[capacity];
};

class Stream {
 public:
  Stream() = default;
  virtual ~Stream() = default;
  // The caller's own, where that is the calling thread: what it is given has been done when the call returns, and its
  // waits block. Else events alone order what it is given.
  bool is_calling_thread() const noexcept { return is_calling_thread_; }
  // Does it run host functions? Such a stream also ends by itself once its context has failed: what waits in it polls.
  virtual bool runs_tasks() const noexcept { return false; }
  // A caller that would wait at once for work of a stream with a thread of its own may do the work itself, from borrow
  // until give_back. borrow is false where the stream has other work or no such thread. What fails meanwhile is thrown,
  // and fails the context as it does in the stream.
  virtual bool borrow() noexcept { return false; }
  virtual void give_back() noexcept {}
  virtual void record(Event &event) = 0;      // done when all that was enqueued before is done
  virtual void wait(const Event &event) = 0;  // what follows starts after the event's last record
  virtual void run(const Task &task) = 0;     // where it runs_tasks; others throw INTERNAL
  virtual void copy(void *to, const void *from, size_t bytes) = 0;
  virtual void fill(void *to, uint8_t byte, size_t bytes) = 0;
  virtual void cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) = 0;
  // fp32 to codes with a scale for each block, see device/quantize.h
  virtual void quantize_mxfp8(const Mxfp8Quantize &work) = 0;
  virtual void quantize_fp8_blocks(const Fp8BlockQuantize &work) = 0;
  virtual void swizzle_scales(const Mxfp8Swizzle &work) = 0;
  // *result = number of scales that stand for Inf or NaN, or of such numbers in blocks that have been quantized
  virtual void count_nonfinite_scales(uint64_t *result, const uint8_t *scales, uint64_t count) = 0;
  virtual void count_nonfinite_blocks(uint64_t *result, const Fp8BlockQuantize &work) = 0;
  // ... or one for all, of the largest magnitude that any rank has of them: *amax = this rank's, 0 of no numbers
  virtual void find_amax(float *amax, const float *values, uint64_t count, bool via_bf16) = 0;
  virtual void find_fp8_scales(const Fp8Scales &work) = 0;
  virtual void quantize_fp8(const Fp8Quantize &work) = 0;
  // to += from in to's dtype, computed in fp32 and rounded once
  virtual void add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) = 0;
  virtual void scale_all(std::span<const FloatSpan> spans, float factor) = 0;
  virtual void rank_sum(const RankSum &sum) = 0;
  // *result = sum of squares in fp64: partial sums per granule, in a fixed order (norm_piece in device/work.h)
  virtual void sum_all_squares(std::span<const SquaresSpan> spans) = 0;
  // *result = the sum of the values in their order
  virtual void sum_values(double *result, const double *values, uint64_t count) = 0;
  virtual void find_norm(Norm *norm, const NormShares &shares) = 0;
  // values *= *factor, read when the work is done; one of 1 changes no bit
  virtual void scale_all_by(std::span<const FloatSpan> spans, const float *factor) = 0;
  // *result = number of elements that are Inf or NaN
  virtual void count_nonfinite(uint64_t *result, const float *values, uint64_t count) = 0;
  // One step of many pieces; the spans stay where they are until it is done.
  virtual void adamw(const AdamW &step, std::span<const AdamWSpan> spans) = 0;
  // The same with a step that is read when the work is done, from memory of the device: for graphs, whose step changes
  // from replay to replay. store_step writes it there, in the order of the stream.
  virtual void adamw_from(const AdamW *step, std::span<const AdamWSpan> spans) = 0;
  virtual void store_step(AdamW *to, const AdamW &step) = 0;
  // Of one array.
  void scale(float *values, float factor, uint64_t count) {
    const FloatSpan one{values, count};
    scale_all({&one, 1}, factor);
  }
  void scale_by(float *values, const float *factor, uint64_t count) {
    const FloatSpan one{values, count};
    scale_all_by({&one, 1}, factor);
  }
  void sum_squares(double *result, const float *values, uint64_t count, uint64_t granule) {
    const SquaresSpan one{result, values, count, granule};
    sum_all_squares({&one, 1});
  }
  // The graph capture that the stream is in, as CUDA numbers them; 0: none. See Device::begin_capture.
  virtual uint64_t capture_id() const { return 0; }
  // The device's own handle; NULL on the host.
  virtual fsdp_stream handle() const noexcept { return nullptr; }

 protected:
  explicit Stream(bool is_calling_thread) : is_calling_thread_(is_calling_thread) {}

 private:
  const bool is_calling_thread_ = false;
};

// A stream's work on the calling thread, while this lives and if it can be.
class BorrowedStream {
 public:
  explicit BorrowedStream(Stream &stream) : stream_(stream.borrow() ? &stream : nullptr) {}
  ~BorrowedStream() {
    if (stream_) stream_->give_back();
  }
  explicit operator bool() const noexcept { return stream_ != nullptr; }
  BorrowedStream(const BorrowedStream &) = delete;
  BorrowedStream &operator=(const BorrowedStream &) = delete;

 private:
  Stream *stream_;
};

// Host work that belongs between pieces of device work: a stream of the host that waits for streams of the device and
// that they wait for. What fails in it fails the context, and the device's streams go on.
class HostLane {
 public:
  virtual ~HostLane() = default;
  virtual Stream &stream() = 0;               // of the host: tasks, kernels over host memory, events of the host
  virtual void wait(const Event &event) = 0;  // what is given to the lane from now on starts after the device's event
  virtual void release(Stream &device_stream) = 0;  // what follows on it starts after what the lane was given so far
};

// Private memory of the device, populated, zeroed, page-aligned; given back by the destructor.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::byte *data() const noexcept = 0;
  virtual uint64_t size_bytes() const noexcept = 0;
};

// What a device is, where that shows outside of it: known of its kind, also where there is none (a context that plans).
struct Traits {
  bool host_memory;  // its memory is the host's: any thread reads it in place, and ranks of a host map each other's;
                     // else what ranks exchange are messages in the order of streams
  bool graphs;       // what its streams are given can be captured into graphs
};
const Traits &traits_of(fsdp_device_kind kind) noexcept;

struct Options {
  bool overlap = true;    // false: streams do their work on the calling thread at once
  uint32_t delay_us = 0;  // longest random delay before each piece of work of a library stream
  uint64_t delay_seed = 0;
  uint64_t failed_allocation = 0;  // the n-th allocate() or allocate_host() fails, from 1
  std::function<void(const std::string &)> warn =
      {};  // told by destructors, on their thread, of what they had to leave
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::unique_ptr<Stream> create_stream(const std::string &name) = 0;
  virtual std::unique_ptr<Event> create_event() = 0;
  virtual std::unique_ptr<Memory> allocate(uint64_t bytes, const char *what) = 0;
  // Memory of the host that kernels of the device can read and write too.
  virtual std::unique_ptr<Memory> allocate_host(uint64_t bytes, const char *what) = 0;
  // The caller's stream. On the host device NULL only, the calling thread: record completes at once, wait blocks.
  virtual Stream &caller_stream(fsdp_stream stream) = 0;
  // The calling thread as a stream of the host, whatever the device.
  virtual Stream &calling_thread() = 0;
  virtual const Traits &traits() const noexcept = 0;
  // Cast between this device's memory and the caller's, which may be the host's or the device's. In the order of the
  // caller's stream NULL; done when it returns.
  virtual void transfer(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) = 0;
  // Not on the host device.
  virtual std::unique_ptr<HostLane> create_host_lane(const std::string &name) = 0;
  // Let the device read and write this host memory, which the library did not allocate, without copies on the way;
  // until unregister_host. On the host: nothing to do.
  virtual void register_host(void *data, uint64_t bytes) = 0;
  // False: the device may use it for ever, and it must stay where it is.
  virtual bool unregister_host(void *data, uint64_t bytes) noexcept = 0;
  // From begin_capture to end_capture, streams may be captured into the graph of this number and no other. A record on
  // a captured stream is then a point of the graph: done() is false until end_capture, and after that the event is what
  // it was before the capture. On a captured stream, waits for events of before the capture do nothing: the replay is
  // ordered after them. Without begin_capture, records on captured streams are INVALID_STATE.
  virtual void begin_capture(uint64_t id) = 0;
  virtual void end_capture() noexcept = 0;
  // Block the calling thread, polling the waiter.
  virtual void synchronize(const Event &event) = 0;
  // The n-th allocation fails if the options say so; shared memory asks before it allocates.
  virtual void count_allocation(uint64_t bytes, const char *what) = 0;
  virtual uint64_t allocations() const noexcept = 0;  // counted so far
  // Which of the machine's devices of its kind, as its libraries count them; -1 for the host.
  virtual int32_t index() const noexcept { return -1; }
  // Those of the device that the library has made here and that are alive; 0: they are threads of the host.
  virtual uint32_t streams() const noexcept { return 0; }
  // Runs it while this device is the calling thread's current one, as the device's own libraries want it.
  virtual void with_current(const std::function<void()> &body) const { body(); }

  // The order in which communicators of this device launch kernels that wait for other ranks, where they must keep one:
  // made and read by comm alone, for whatever communicates on one device shares it.
  std::shared_ptr<void> launch_order;
  virtual std::string description() const = 0;  // for the log: which one, and what of it is used
};

// The instruction set that the host kernels use on this machine.
const char *host_instruction_set();

// waiter is for waits on the caller's thread, failure for the streams; both outlive the device.
std::unique_ptr<Device> create_host_device(const Options &options, const Waiter &waiter, Failure &failure);
// index: which GPU, -1 for the calling thread's current one. UNSUPPORTED where there is none, with CUDA's own words.
std::unique_ptr<Device> create_cuda_device(int32_t index, const Options &options, const Waiter &waiter,
                                           Failure &failure);
// What this build has, for people: "no", or which toolkit and which architectures.
const char *cuda_description() noexcept;
// ... and what it finds on this machine: the driver, GPUs. Empty in a build without CUDA.
std::string cuda_at_run_time();

}  // namespace fsdp::device
