// SPDX-License-Identifier: Apache-2.0

#include "device/host/stream.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <new>

#include "base/float_environment.h"
#include "base/library_thread.h"
#include "device/host/kernels.h"

namespace fsdp::device {

void HostStream::copy(void *to, const void *from, size_t bytes) {
  if (bytes) run([=] { kernels::copy_bytes(to, from, bytes); });
}

void HostStream::fill(void *to, uint8_t byte, size_t bytes) {
  if (bytes) run([=] { std::memset(to, byte, bytes); });
}

void HostStream::cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  if (count) run([=] { kernels::cast(to, to_dtype, from, from_dtype, count); });
}

void HostStream::quantize_all_mxfp8(std::span<const Mxfp8Quantize> works, uint64_t *found) {
  for (size_t i = 0; i < works.size(); ++i)
    run([work = works[i], result = found ? found + i : nullptr] {
      kernels::quantize_mxfp8(work);
      if (result) *result = kernels::count_nonfinite_scales(work.row_scales, work.rows * work.columns / mxfp8_block);
    });
}

void HostStream::quantize_all_fp8_blocks(std::span<const Fp8BlockQuantize> works, uint64_t *found) {
  for (size_t i = 0; i < works.size(); ++i)
    run([work = works[i], result = found ? found + i : nullptr] {
      kernels::quantize_fp8_blocks(work);
      if (result) *result = kernels::count_nonfinite_blocks(work);
    });
}

void HostStream::swizzle_scales(const Mxfp8Swizzle &work) {
  run([work] { kernels::swizzle_scales(work); });
}

void HostStream::find_all_amaxes(std::span<const AmaxSpan> spans) {
  for (const AmaxSpan &span : spans)
    run([span] { *span.amax = kernels::find_amax(span.values, span.count, span.via_bf16); });
}

void HostStream::find_fp8_scales(const Fp8Scales &work) {
  run([work] { kernels::find_fp8_scales(work); });
}

void HostStream::quantize_all_fp8(std::span<const Fp8Quantize> works) {
  for (const Fp8Quantize &work : works) run([work] { kernels::quantize_fp8(work); });
}

void HostStream::add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  if (count) run([=] { kernels::add(to, to_dtype, from, from_dtype, count); });
}

void HostStream::scale_all(std::span<const FloatSpan> spans, float factor) {
  for (const FloatSpan &span : spans)
    if (span.count) run([span, factor] { kernels::scale(span.values, factor, span.count); });
}

void HostStream::rank_sum(const RankSum &sum) {
  if (sum.count) run([sum] { kernels::rank_sum(sum); });
}

void HostStream::sum_all_squares(std::span<const SquaresSpan> spans) {
  for (const SquaresSpan &span : spans)
    run([span] { *span.result = kernels::sum_squares(span.values, span.count, span.granule); });
}

void HostStream::sum_all_compact_squares(std::span<const CompactSquaresSpan> spans) {
  for (const CompactSquaresSpan &span : spans) run([span] { *span.result = kernels::sum_compact_squares(span); });
}

void HostStream::sum_values(double *result, const double *values, uint64_t count) {
  run([=] { *result = kernels::sum_values(values, count); });
}

void HostStream::find_norm(Norm *norm, const NormShares &shares) {
  run([=] { *norm = kernels::find_norm(shares); });
}

void HostStream::scale_all_by(std::span<const FloatSpan> spans, const float *factor) {
  for (const FloatSpan &span : spans)
    if (span.count)
      run([span, factor] {
        if (*factor != 1) kernels::scale(span.values, *factor, span.count);
      });
}

void HostStream::count_nonfinite(uint64_t *result, const float *values, uint64_t count) {
  run([=] { *result = kernels::count_nonfinite(values, count); });
}

void HostStream::count_zeros(uint64_t *result, const float *values, uint64_t count) {
  run([=] { *result = kernels::count_zeros(values, count); });
}

void HostStream::adamw(const AdamW &step, std::span<const AdamWSpan> spans) {
  if (!spans.empty()) run([step, spans] { kernels::adamw(step, spans); });
}

void HostStream::adamw_from(const AdamW *step, std::span<const AdamWSpan> spans) {
  if (!spans.empty()) run([step, spans] { kernels::adamw(*step, spans); });
}

void HostStream::compact_adamw(const AdamW &step, std::span<const CompactSpan> spans) {
  if (!spans.empty()) run([step, spans] { kernels::compact_adamw(step, spans); });
}

void HostStream::compact_adamw_from(const AdamW *step, std::span<const CompactSpan> spans) {
  if (!spans.empty()) run([step, spans] { kernels::compact_adamw(*step, spans); });
}

void HostStream::store_step(AdamW *to, const AdamW &step) {
  run([to, step] { *to = step; });
}

void HostStream::round_randomly(const RandomRounding &work) {
  run([work] { kernels::round_randomly(work); });
}

void HostCallerStream::run(const Task &task) {
  Task copy = task;  // copied as in a queue, because the task may change its own state
  copy();
}

void InlineStream::run(const Task &task) {
  failure_.check();
  delay_();
  run_for_stream(task, failure_);
}

void run_for_stream(Task task, Failure &failure) {
  try {
    task();
  } catch (...) {
    const Error error = current_error();
    failure.set(error);
    throw error;
  }
}

namespace {

uint64_t hash_name(std::string_view name) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

uint64_t next_random(uint64_t &state) {  // splitmix64, Steele et al. 2014
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

Delay::Delay(const Options &options, std::string_view stream_name)
    : longest_us_(options.delay_us), state_(options.delay_seed ^ hash_name(stream_name)) {}

uint64_t Delay::next_us() { return next_random(state_) % (uint64_t{longest_us_} + 1); }

void Delay::operator()() {
  if (longest_us_ == 0) return;
  const uint64_t us = next_us();
  timespec left{static_cast<time_t>(us / 1000000), static_cast<long>(us % 1000000 * 1000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
  }
}

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

SpinBudget::SpinBudget() {
  cpu_set_t cpus;
  const bool alone = sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) == 1;
  longest_ = alone ? 0us : 20us;
  budget_ = longest_;
}

void SpinBudget::observe(std::chrono::nanoseconds idle) {
  budget_ = idle <= 20us ? std::max<std::chrono::nanoseconds>(budget_ * 2, 1us) : budget_ / 2;
  budget_ = std::min(budget_, longest_);
}

WorkerStream::WorkerStream(const Options &options, const std::string &name, Progress &progress,
                           const Waiter &caller_waiter, const Waiter &worker_waiter, Failure &failure)
    : progress_(progress),
      caller_waiter_(caller_waiter),
      worker_waiter_(worker_waiter),
      failure_(failure),
      gives_way_(options.gives_way),
      delay_(options, name),
      ring_(std::make_unique<Task[]>(capacity)) {
  start(name);
}

WorkerStream::~WorkerStream() {
  stop_.store(true, std::memory_order_seq_cst);
  wake();
  pthread_join(thread_, nullptr);
}

void WorkerStream::start(const std::string &name) {
  const auto body = [](void *self) -> void * {
    static_cast<WorkerStream *>(self)->work();
    return nullptr;
  };
  thread_ = LibraryThread{"fsdp-" + name, format_text("stream '{}'", name)}.start(body, this);
}

// Delays must delay streams and not their callers, so a stream with delays is not borrowed.
bool WorkerStream::borrow() noexcept {
  borrowed_ = !delay_.delays() && progress_.completed() == enqueued_.load(std::memory_order_relaxed);
  return borrowed_;
}

void WorkerStream::record(Event &event) {
  host_event(event).set(&progress_, enqueued_.load(std::memory_order_relaxed));
}

// The count is read now, so that a later record of the same event does not affect this wait.
void WorkerStream::wait(const Event &event) {
  if (event.done()) return;
  const auto &host = host_event(event);
  if (host.progress() == &progress_) return;  // the event is in this stream's own past
  run([this, other = host.progress(), count = host.count()] { await_other(*other, count); });
}

// Runs in the worker. Callers that wait for the worker can find the stream for which it waits.
void WorkerStream::await_other(Progress &other, uint64_t count) {
  progress_.set_awaited(&other);
  try {
    await_progress(other, count, worker_waiter_);
  } catch (...) {
    progress_.set_awaited(nullptr);
    throw;
  }
  progress_.set_awaited(nullptr);
}

void WorkerStream::run(const Task &task) {
  if (borrowed_) {
    failure_.check();
    return run_for_stream(task, failure_);
  }
  const uint64_t ticket = enqueued_.load(std::memory_order_relaxed);
  if (ticket - progress_.completed() >= capacity) await_progress(progress_, ticket - capacity + 1, caller_waiter_);
  ring_[ticket % capacity] = task;
  enqueued_.store(ticket + 1, std::memory_order_seq_cst);
  wake();
}

void WorkerStream::wake() noexcept {
  if (asleep_.load(std::memory_order_seq_cst) == 0) return;
  asleep_.store(0, std::memory_order_seq_cst);
  futex_wake_all(asleep_);
}

void WorkerStream::work() noexcept {
  if (gives_way_) give_way();
  const FloatEnvironment standard;  // for tasks that compute
  progress_.set_worker(thread_number());
  for (uint64_t done = 0; next(done);) {
    step(ring_[done % capacity]);
    progress_.complete(++done);
  }
}

bool WorkerStream::next(uint64_t done) noexcept {
  const auto filled = [&] { return enqueued_.load(std::memory_order_acquire) != done; };
  if (filled()) return true;
  const auto since = Clock::now();
  const auto due = [&] { return filled() || stop_.load(std::memory_order_acquire); };
  if (!spin_until(due, spin_.get())) sleep(done);
  spin_.observe(Clock::now() - since);
  return filled();
}

// The worker sets asleep_ before it checks the ring for the last time; the producer fills the ring before it reads
// asleep_. So at least one of the two sees the other's store.
void WorkerStream::sleep(uint64_t done) noexcept {
  for (;;) {
    asleep_.store(1, std::memory_order_seq_cst);
    if (enqueued_.load(std::memory_order_seq_cst) != done || stop_.load(std::memory_order_seq_cst)) break;
    futex_wait(asleep_, 1, -1ns);
  }
  asleep_.store(0, std::memory_order_relaxed);
}

void WorkerStream::step(Task &task) noexcept {
  if (broken_ || failure_.failed()) return;
  delay_();
  if (failure_.failed()) return;
  try {
    task();
  } catch (...) {
    broken_ = true;  // set even if the error could not be stored for lack of memory
    failure_.set(current_error());
  }
}

}  // namespace fsdp::device
