// SPDX-License-Identifier: Apache-2.0
// The streams of the host device: streams that work on the calling thread, and WorkerStream, which has its own thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/failure.h"
#include "device/device.h"
#include "device/host/progress.h"

namespace fsdp::device {

// Every piece of work is a task that calls a kernel; a subclass decides where and when tasks run.
class HostStream : public Stream {
 public:
  using Stream::Stream;
  HostStream() = default;
  bool runs_tasks() const noexcept override { return true; }
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
};

// The calling thread as a stream. A task's exception is thrown to the caller and does not fail the context.
class HostCallerStream final : public HostStream {
 public:
  explicit HostCallerStream(const Waiter &waiter) : HostStream(true), waiter_(waiter) {}
  void record(Event &event) override { host_event(event).set(nullptr, 0); }
  void wait(const Event &event) override { await_event(event, waiter_); }
  void run(const Task &task) override;

 private:
  const Waiter &waiter_;
};

// Sleeps a pseudo-random time before each piece of work. The times depend only on the seed and the stream's name.
class Delay {
 public:
  Delay(const Options &options, std::string_view stream_name);
  void operator()();
  bool delays() const noexcept { return longest_us_ > 0; }
  uint64_t next_us();  // returns the next time, without sleeping

 private:
  uint32_t longest_us_;
  uint64_t state_;
};

// A library stream without overlap. It works in the order of calls on the calling thread, but an error fails the
// context as it does on a worker.
class InlineStream final : public HostStream {
 public:
  InlineStream(const Options &options, std::string_view name, const Waiter &waiter, Failure &failure)
      : waiter_(waiter), failure_(failure), delay_(options, name) {}
  void record(Event &event) override { host_event(event).set(nullptr, 0); }
  void wait(const Event &event) override { await_event(event, waiter_); }
  void run(const Task &task) override;

 private:
  const Waiter &waiter_;
  Failure &failure_;
  Delay delay_;
};

// Runs the task now, on the calling thread. An exception also fails the context.
void run_for_stream(Task task, Failure &failure);

// A library stream with its own thread: a ring of tasks that one thread at a time fills and the worker empties.
// Nothing is allocated after creation, and the producer makes no system call while the worker is awake.

// How long an idle worker spins before it sleeps; it spins long only while work has been arriving quickly. A worker
// that loses its core while it spins also measures a long idle time, so spinning also ends if cores are oversubscribed.
class SpinBudget {
 public:
  SpinBudget();
  std::chrono::nanoseconds get() const { return budget_; }
  void observe(std::chrono::nanoseconds idle);

 private:
  std::chrono::nanoseconds longest_;
  std::chrono::nanoseconds budget_;
};

class WorkerStream final : public HostStream {
 public:
  static constexpr uint64_t capacity = 1024;

  // `caller_waiter` is for waits while the ring is full, and `worker_waiter` is for waits inside the stream.
  WorkerStream(const Options &options, const std::string &name, Progress &progress, const Waiter &caller_waiter,
               const Waiter &worker_waiter, Failure &failure);
  // Finishes the enqueued work (skips it if the context has failed) and joins the worker.
  ~WorkerStream() override;

  bool borrow() noexcept override;
  void give_back() noexcept override { borrowed_ = false; }
  bool is_borrowed() const noexcept override { return borrowed_; }
  void record(Event &event) override;
  void wait(const Event &event) override;
  void run(const Task &task) override;

 private:
  void start(const std::string &name);
  void wake() noexcept;
  void work() noexcept;
  bool next(uint64_t done) noexcept;  // false: the worker must stop, and no work is left
  void sleep(uint64_t done) noexcept;
  void step(Task &task) noexcept;
  void await_other(Progress &other, uint64_t count);

  Progress &progress_;
  const Waiter &caller_waiter_;
  const Waiter &worker_waiter_;
  Failure &failure_;
  const bool gives_way_;
  Delay delay_;
  SpinBudget spin_;
  bool broken_ = false;    // used only by the worker: a task threw
  bool borrowed_ = false;  // used only by the producer: it does its work itself, with an empty ring
  std::unique_ptr<Task[]> ring_;
  alignas(64) std::atomic<uint64_t> enqueued_{0};
  std::atomic<bool> stop_{false};
  alignas(64) Word asleep_{0};
  pthread_t thread_{};
};

}  // namespace fsdp::device
