// SPDX-License-Identifier: Apache-2.0
#include "device/host/stream.h"

#include <cerrno>
#include <ctime>
#include <new>

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

void HostStream::quantize_mxfp8(const Mxfp8Quantize &work) {
  run([work] { kernels::quantize_mxfp8(work); });
}

void HostStream::quantize_fp8_blocks(const Fp8BlockQuantize &work) {
  run([work] { kernels::quantize_fp8_blocks(work); });
}

void HostStream::swizzle_scales(const Mxfp8Swizzle &work) {
  run([work] { kernels::swizzle_scales(work); });
}

void HostStream::count_nonfinite_scales(uint64_t *result, const uint8_t *scales, uint64_t count) {
  run([=] { *result = kernels::count_nonfinite_scales(scales, count); });
}

void HostStream::count_nonfinite_blocks(uint64_t *result, const Fp8BlockQuantize &work) {
  run([=] { *result = kernels::count_nonfinite_blocks(work); });
}

void HostStream::find_amax(float *amax, const float *values, uint64_t count, bool via_bf16) {
  run([=] { *amax = kernels::find_amax(values, count, via_bf16); });
}

void HostStream::find_fp8_scales(const Fp8Scales &work) {
  run([work] { kernels::find_fp8_scales(work); });
}

void HostStream::quantize_fp8(const Fp8Quantize &work) {
  run([work] { kernels::quantize_fp8(work); });
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

void HostStream::adamw(const AdamW &step, std::span<const AdamWSpan> spans) {
  if (!spans.empty()) run([step, spans] { kernels::adamw(step, spans); });
}

void HostStream::adamw_from(const AdamW *step, std::span<const AdamWSpan> spans) {
  if (!spans.empty()) run([step, spans] { kernels::adamw(*step, spans); });
}

void HostStream::store_step(AdamW *to, const AdamW &step) {
  run([to, step] { *to = step; });
}

void HostCallerStream::run(const Task &task) {
  Task copy = task;  // as a queue would: the task may change its own state
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

}  // namespace fsdp::device
