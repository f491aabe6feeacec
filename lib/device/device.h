// SPDX-License-Identifier: Apache-2.0
// The interface of a device for the engine and the communicators. The implementations are host/ and cuda/; only
// factory.cpp chooses one. Memory that enqueued work uses must stay valid until the stream has done the work.
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

// A point in a stream's order. Events are reusable and allocate nothing after creation; an event that was never
// recorded is done. If an event is recorded on a stream of a GPU while its last record, on another stream, is not done,
// the new stream is ordered after the other one.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() const noexcept = 0;
};

// A host function that runs in the order of a stream of the host. It is copied into the stream's queue, so it must be
// trivially copyable and have at most `capacity` bytes. It may wait for a bounded time and may throw an Error. The
// stream then fails its context and skips later work.
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
  // Does the stream work on the calling thread? If so, its work is done when the call returns, and its waits block. If
  // not, its work is ordered only by events.
  bool is_calling_thread() const noexcept { return is_calling_thread_; }
  // Does the stream run host functions? Such a stream also ends by itself once its context has failed, because its
  // waits poll the context.
  virtual bool runs_tasks() const noexcept { return false; }
  // A caller may do the work of a stream with its own thread itself, between borrow() and give_back(). borrow() returns
  // false if the stream has other work or no thread. Errors of the work are then thrown, and fail the context as they
  // do in the stream. If a peer is late, a sum gives the stream back by itself.
  virtual bool borrow() noexcept { return false; }
  virtual void give_back() noexcept {}
  virtual bool is_borrowed() const noexcept { return false; }
  virtual void record(Event &event) = 0;      // the event is done when all earlier work is done
  virtual void wait(const Event &event) = 0;  // work enqueued later starts after the event's last record
  virtual void run(const Task &task) = 0;     // throws INTERNAL unless runs_tasks()
  virtual void copy(void *to, const void *from, size_t bytes) = 0;
  virtual void fill(void *to, uint8_t byte, size_t bytes) = 0;
  virtual void cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) = 0;
  // These functions convert many matrices of fp32 to codes with a scale for each block; see device/quantize.h. Unless
  // `found` is NULL, they set found[i]. For MXFP8 it is the number of ROW scales of works[i] that stand for Inf or NaN,
  // otherwise the number of Inf and NaN.
  virtual void quantize_all_mxfp8(std::span<const Mxfp8Quantize> works, uint64_t *found) = 0;
  virtual void quantize_all_fp8_blocks(std::span<const Fp8BlockQuantize> works, uint64_t *found) = 0;
  virtual void swizzle_scales(const Mxfp8Swizzle &work) = 0;
  // These functions convert tensors of fp32 to codes with one scale each, which is found from the largest magnitude on
  // any rank. find_all_amaxes sets each *amax to this rank's largest magnitude; it is 0 if there are no numbers.
  virtual void find_all_amaxes(std::span<const AmaxSpan> spans) = 0;
  virtual void find_fp8_scales(const Fp8Scales &work) = 0;
  virtual void quantize_all_fp8(std::span<const Fp8Quantize> works) = 0;
  // to += from in to's dtype, computed in fp32 and rounded once
  virtual void add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) = 0;
  virtual void scale_all(std::span<const FloatSpan> spans, float factor) = 0;
  virtual void rank_sum(const RankSum &sum) = 0;
  // *result = the sum of squares in fp64, from partial sums per granule in a fixed order (norm_piece in device/work.h)
  virtual void sum_all_squares(std::span<const SquaresSpan> spans) = 0;
  virtual void sum_all_compact_squares(std::span<const CompactSquaresSpan> spans) = 0;
  // *result = the sum of the values in their order
  virtual void sum_values(double *result, const double *values, uint64_t count) = 0;
  virtual void find_norm(Norm *norm, const NormShares &shares) = 0;
  // values *= *factor. The factor is read when the work executes; a factor of 1 changes no bit.
  virtual void scale_all_by(std::span<const FloatSpan> spans, const float *factor) = 0;
  // *result = the number of elements that are Inf or NaN
  virtual void count_nonfinite(uint64_t *result, const float *values, uint64_t count) = 0;
  // *result = the number of elements that are +0 or -0
  virtual void count_zeros(uint64_t *result, const float *values, uint64_t count) = 0;
  // Makes one step on many pieces. The spans must not move until the step is done.
  virtual void adamw(const AdamW &step, std::span<const AdamWSpan> spans) = 0;
  // Does the same, but reads the step from memory of the device when the work executes. It is for graphs, whose step
  // changes from replay to replay. store_step writes the step to that memory, in the order of the stream.
  virtual void adamw_from(const AdamW *step, std::span<const AdamWSpan> spans) = 0;
  virtual void compact_adamw(const AdamW &step, std::span<const CompactSpan> spans) = 0;
  virtual void compact_adamw_from(const AdamW *step, std::span<const CompactSpan> spans) = 0;
  virtual void store_step(AdamW *to, const AdamW &step) = 0;
  virtual void round_randomly(const RandomRounding &work) = 0;
  // These functions work on one array.
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
  void quantize_mxfp8(const Mxfp8Quantize &work) { quantize_all_mxfp8({&work, 1}, nullptr); }
  void quantize_fp8_blocks(const Fp8BlockQuantize &work) { quantize_all_fp8_blocks({&work, 1}, nullptr); }
  void quantize_fp8(const Fp8Quantize &work) { quantize_all_fp8({&work, 1}); }
  void find_amax(float *amax, const float *values, uint64_t count, bool via_bf16) {
    const AmaxSpan one{amax, values, count, via_bf16};
    find_all_amaxes({&one, 1});
  }
  // CUDA's number of the graph capture to which the stream belongs; 0: none. See Device::begin_capture.
  virtual uint64_t capture_id() const { return 0; }
  // The device's own handle; NULL on the host.
  virtual fsdp_stream handle() const noexcept { return nullptr; }

 protected:
  explicit Stream(bool is_calling_thread) : is_calling_thread_(is_calling_thread) {}

 private:
  const bool is_calling_thread_ = false;
};

// During this scope the stream's work is done on the calling thread, if that is wanted and the stream can be borrowed.
class BorrowedStream {
 public:
  explicit BorrowedStream(Stream &stream, bool wanted = true)
      : stream_(wanted && stream.borrow() ? &stream : nullptr) {}
  ~BorrowedStream() {
    if (stream_) stream_->give_back();
  }
  explicit operator bool() const noexcept { return stream_ != nullptr; }
  BorrowedStream(const BorrowedStream &) = delete;
  BorrowedStream &operator=(const BorrowedStream &) = delete;

 private:
  Stream *stream_;
};

// Host work between pieces of device work: a stream of the host that waits for streams of the device, and for which
// these wait. An error in the lane fails the context, and the device's streams continue.
class HostLane {
 public:
  virtual ~HostLane() = default;
  virtual Stream &stream() = 0;  // a stream of the host, for tasks, kernels over host memory and events of the host
  virtual void wait(const Event &event) = 0;  // later work of the lane starts after the device's event
  // Later work on the device's stream starts after the work that is now enqueued on the lane.
  virtual void release(Stream &device_stream) = 0;
};

// Private memory of the device: populated, zeroed and page-aligned. The destructor frees it.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::byte *data() const noexcept = 0;
  virtual uint64_t size_bytes() const noexcept = 0;
};

// The properties of a kind of device that matter to other code. They are known even without a device, for example in a
// context that only plans.
struct Traits {
  // Is the device's memory the host's? If so, any thread reads it in place, and ranks of a host map each other's
  // memory. If not, ranks exchange messages in the order of streams.
  bool host_memory;
  bool graphs;  // the work of its streams can be captured into graphs
};
const Traits &traits_of(fsdp_device_kind kind) noexcept;

struct Options {
  bool overlap = true;     // false: streams do their work immediately, on the calling thread
  bool gives_way = false;  // true: threads of streams do not interrupt the program's threads on their core (give_way())
  uint32_t delay_us = 0;   // longest random delay before each piece of work of a library stream
  uint64_t delay_seed = 0;
  uint64_t failed_allocation = 0;  // number of the call of allocate() or allocate_host() that fails, from 1; 0: none
  std::function<void(const std::string &)> warn =
      {};  // destructors report memory that they could not free here, on their thread
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::unique_ptr<Stream> create_stream(const std::string &name) = 0;
  // The threads of streams that are created later give way to the program's threads (Options::gives_way). This is for
  // hosts with about one core a rank. Does nothing if streams have no host threads.
  virtual void give_way() noexcept {}
  virtual std::unique_ptr<Event> create_event() = 0;
  virtual std::unique_ptr<Memory> allocate(uint64_t bytes, const char *what) = 0;
  // Allocates memory of the host that kernels of the device can also read and write.
  virtual std::unique_ptr<Memory> allocate_host(uint64_t bytes, const char *what) = 0;
  // The caller's stream. On the host device it must be NULL, which is the calling thread: a record is done immediately,
  // and a wait blocks.
  virtual Stream &caller_stream(fsdp_stream stream) = 0;
  // The calling thread as a stream of the host, for any device.
  virtual Stream &calling_thread() = 0;
  virtual const Traits &traits() const noexcept = 0;
  // Casts between this device's memory and the caller's memory, which may be the host's or the device's. The cast is
  // ordered with the caller's stream NULL, and is done when the call returns.
  virtual void transfer(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) = 0;
  virtual std::unique_ptr<HostLane> create_host_lane(const std::string &name) = 0;
  // Lets the device read and write this host memory, which the library did not allocate, without intermediate copies,
  // until unregister_host(). Does nothing on the host device.
  virtual void register_host(void *data, uint64_t bytes) = 0;
  // Returns false if the device may use the memory forever; the memory must then stay allocated.
  virtual bool unregister_host(void *data, uint64_t bytes) noexcept = 0;
  // From begin_capture to end_capture, streams may be captured into the graph with this number, and into no other. A
  // record on a captured stream is then a point of the graph, and the event's done() is false until end_capture.
  // Afterwards the event has the state again that it had before the capture. On a captured stream, waits for events
  // that were recorded before the capture do nothing, because the replay is ordered after them. Without begin_capture,
  // records on captured streams throw INVALID_STATE.
  virtual void begin_capture(uint64_t id) = 0;
  virtual void end_capture() noexcept = 0;
  // Blocks the calling thread until the event is done, polling the waiter.
  virtual void synchronize(const Event &event) = 0;
  // For tests of failures: counts an allocation, and throws if it is the one that options.failed_allocation names.
  // Called for shared memory before it is allocated.
  virtual void count_allocation(uint64_t bytes, const char *what) = 0;
  virtual uint64_t allocations() const noexcept = 0;  // number of allocations counted so far
  // The number of this device among the machine's devices of its kind, as its libraries count them; -1 for the host.
  virtual int32_t index() const noexcept { return -1; }
  // The number of live streams that the library has made on the device; 0 on the host, whose streams are threads.
  virtual uint32_t streams() const noexcept { return 0; }
  // Runs the body while this device is the calling thread's current device, as libraries of the device require.
  virtual void with_current(const std::function<void()> &body) const { body(); }

  // The order in which communicators of this device launch kernels that wait for other ranks, if an order is necessary.
  // Only the transport room makes and reads it; all communicators on one device share it.
  std::shared_ptr<void> launch_order;
  virtual std::string description() const = 0;  // for the log: the device, and which of its features are used
};

// The instruction set that the host kernels use on this machine.
const char *host_instruction_set();

// `waiter` is for waits on the caller's thread, and `failure` is for the streams. Both must outlive the device.
std::unique_ptr<Device> create_host_device(const Options &options, const Waiter &waiter, Failure &failure);
// `index` is the number of the GPU, or -1 for the calling thread's current GPU. Throws UNSUPPORTED with CUDA's own text
// if there is no GPU.
std::unique_ptr<Device> create_cuda_device(int32_t index, const Options &options, const Waiter &waiter,
                                           Failure &failure);
// Describes this build's CUDA to users: "no", or the toolkit and the architectures.
const char *cuda_description() noexcept;
// Describes the driver and the GPUs that this build finds on this machine. Empty in a build without CUDA.
std::string cuda_at_run_time();

}  // namespace fsdp::device
