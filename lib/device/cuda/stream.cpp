// SPDX-License-Identifier: Apache-2.0

#include "device/cuda/stream.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/dtype.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {

Scratch::Scratch(Core &core, const char *what) : core_(core) {
  const ObjectScope scope(core);
  core.check(cudaMalloc(&data_, kernels::scratch_bytes), "cudaMalloc", what);
}

Scratch::~Scratch() { core_.give_back({Remnant::memory, data_, kernels::scratch_bytes}); }

template <class Call>
void CudaStream::enqueue(const char *call, const Call &work) {
  const DeviceScope scope(core_);
  forget_word();
  before();
  core_.check(static_cast<cudaError_t>(work()), call, name_);
  after();
}

// Called whenever streams synchronize, because the caller may begin and end captures at any time.
uint64_t CudaStream::capture_id() const {
  const DeviceScope scope(core_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream_, &status, &id);
  // The legacy default stream is never captured, and cannot be queried while a blocking stream is captured.
  if (error == cudaErrorStreamCaptureImplicit && core_.live_capture.load(std::memory_order_relaxed) != 0) return 0;
  core_.check(error, "cudaStreamGetCaptureInfo", name_);
  if (status == cudaStreamCaptureStatusInvalidated)
    fail(FSDP_INVALID_STATE, "the graph capture of {} was ended by an error of an earlier call", name_);
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

void CudaStream::record(Event &event) {
  const DeviceScope scope(core_);
  const uint64_t capture = capture_id();
  if (capture != core_.live_capture.load(std::memory_order_relaxed) && capture != 0)
    fail(FSDP_INVALID_STATE, "{} is being captured into a graph without fsdp_begin_capture on it", name_);
  before();
  const AwaitedWord made = cuda_event(event).record(stream_, capture, name_, last_word_ ? &*last_word_ : nullptr);
  if (keeps_word_ && capture == 0) last_word_ = made;
}

// Work from before a capture is not part of the graph, because the replay is ordered after that work.
void CudaStream::wait(const Event &event) {
  const CudaEvent &other = cuda_event(event);
  if (other.on_host())
    fail(FSDP_INTERNAL, "{} cannot wait for an event of a stream of the host: HostLane::release does", name_);
  if (other.done()) return;
  const DeviceScope scope(core_);
  const uint64_t capture = capture_id();
  if (other.capture() == 0 && capture != 0) return;
  if (capture != 0 && other.capture() != capture)
    fail(FSDP_INVALID_STATE, "{} is captured into another graph than the work it is to wait for", name_);
  forget_word();
  other.enqueue_wait(stream_, name_);
  before();
}

void CudaStream::wait_word(PinnedWord &word, uint32_t count) {
  check_outside_capture();
  const DeviceScope scope(core_);
  forget_word();
  core_.check(core_.driver.stream_wait_value(stream_, word.address(), count, CU_STREAM_WAIT_VALUE_GEQ),
              "cuStreamWaitValue32", name_);
}

void CudaStream::check_outside_capture() const {
  const DeviceScope scope(core_);
  if (capture_id() != 0) fail_captured(name_);
}

void CudaStream::run(const Task &) {
  fail(FSDP_INTERNAL, "{} is a stream of GPU {}: it runs no functions of the host", name_, core_.index);
}

void CudaStream::copy(void *to, const void *from, size_t bytes) {
  if (bytes) enqueue("cudaMemcpyAsync", [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_); });
}

void CudaStream::fill(void *to, uint8_t byte, size_t bytes) {
  if (bytes) enqueue("cudaMemsetAsync", [&] { return cudaMemsetAsync(to, byte, bytes, stream_); });
}

void CudaStream::cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  if (to_dtype == from_dtype) return copy(to, from, count * dtype_size(to_dtype));
  if (count) enqueue("kernel cast", [&] { return kernels::cast(stream_, to, to_dtype, from, from_dtype, count); });
}

void CudaStream::quantize_all_mxfp8(std::span<const Mxfp8Quantize> works, uint64_t *found) {
  if (works.empty()) return;
  if (found) fill(found, 0, works.size() * sizeof *found);
  enqueue("kernel quantize_mxfp8", [&] { return kernels::quantize_mxfp8(stream_, works, found); });
}

void CudaStream::quantize_all_fp8_blocks(std::span<const Fp8BlockQuantize> works, uint64_t *found) {
  if (works.empty()) return;
  if (found) fill(found, 0, works.size() * sizeof *found);
  enqueue("kernel quantize_fp8_blocks", [&] { return kernels::quantize_fp8_blocks(stream_, works, found); });
}

void CudaStream::swizzle_scales(const Mxfp8Swizzle &work) {
  enqueue("kernel swizzle_scales", [&] { return kernels::swizzle_scales(stream_, work); });
}

void CudaStream::find_all_amaxes(std::span<const AmaxSpan> spans) {
  if (!spans.empty()) enqueue("kernel find_amaxes", [&] { return kernels::find_amaxes(stream_, spans); });
}

void CudaStream::find_fp8_scales(const Fp8Scales &work) {
  enqueue("kernel find_fp8_scales", [&] { return kernels::find_fp8_scales(stream_, work); });
}

void CudaStream::quantize_all_fp8(std::span<const Fp8Quantize> works) {
  if (!works.empty()) enqueue("kernel quantize_fp8", [&] { return kernels::quantize_fp8(stream_, works); });
}

void CudaStream::add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  if (count) enqueue("kernel add", [&] { return kernels::add(stream_, to, to_dtype, from, from_dtype, count); });
}

void CudaStream::scale_all(std::span<const FloatSpan> spans, float factor) {
  if (!spans.empty()) enqueue("kernel scale", [&] { return kernels::scale(stream_, spans, factor); });
}

void CudaStream::rank_sum(const RankSum &sum) {
  if (sum.count) enqueue("kernel rank_sum", [&] { return kernels::rank_sum(stream_, sum); });
}

void CudaStream::sum_all_squares(std::span<const SquaresSpan> spans) {
  if (spans.empty()) return;
  with_scratch([&](void *scratch) {
    enqueue("kernel sum_squares", [&] { return kernels::sum_squares(stream_, spans, scratch); });
  });
}

void CudaStream::sum_all_compact_squares(std::span<const CompactSquaresSpan> spans) {
  if (spans.empty()) return;
  with_scratch([&](void *scratch) {
    enqueue("kernel sum_compact_squares", [&] { return kernels::sum_compact_squares(stream_, spans, scratch); });
  });
}

void CudaStream::sum_values(double *result, const double *values, uint64_t count) {
  enqueue("kernel sum_values", [&] { return kernels::sum_values(stream_, result, values, count); });
}

void CudaStream::find_norm(Norm *norm, const NormShares &shares) {
  enqueue("kernel find_norm", [&] { return kernels::find_norm(stream_, norm, shares); });
}

void CudaStream::scale_all_by(std::span<const FloatSpan> spans, const float *factor) {
  if (!spans.empty()) enqueue("kernel scale_by", [&] { return kernels::scale_by(stream_, spans, factor); });
}

void CudaStream::count_nonfinite(uint64_t *result, const float *values, uint64_t count) {
  enqueue("kernel count_nonfinite", [&] { return kernels::count_nonfinite(stream_, result, values, count); });
}

void CudaStream::count_zeros(uint64_t *result, const float *values, uint64_t count) {
  enqueue("kernel count_zeros", [&] { return kernels::count_zeros(stream_, result, values, count); });
}

void CudaStream::adamw(const AdamW &step, std::span<const AdamWSpan> spans) {
  if (!spans.empty()) enqueue("kernel adamw", [&] { return kernels::adamw(stream_, step, spans); });
}

void CudaStream::adamw_from(const AdamW *step, std::span<const AdamWSpan> spans) {
  if (!spans.empty()) enqueue("kernel adamw", [&] { return kernels::adamw_from(stream_, step, spans); });
}

void CudaStream::compact_adamw(const AdamW &step, std::span<const CompactSpan> spans) {
  if (!spans.empty()) enqueue("kernel compact_adamw", [&] { return kernels::compact_adamw(stream_, step, spans); });
}

void CudaStream::compact_adamw_from(const AdamW *step, std::span<const CompactSpan> spans) {
  if (!spans.empty())
    enqueue("kernel compact_adamw", [&] { return kernels::compact_adamw_from(stream_, step, spans); });
}

void CudaStream::store_step(AdamW *to, const AdamW &step) {
  enqueue("kernel store_step", [&] { return kernels::store_step(stream_, to, step); });
}

void CudaStream::round_randomly(const RandomRounding &work) {
  enqueue("kernel round_randomly", [&] { return kernels::round_randomly(stream_, work); });
}

// The library's own streams.

namespace {

cudaStream_t create(Core &core, const std::string &name) {
  const ObjectScope scope(core);
  int lowest = 0, highest = 0;
  core.check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange", name);
  cudaStream_t stream = nullptr;
  core.check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority",
             name);
  return stream;
}

}  // namespace

LibraryStream::LibraryStream(Core &core, const std::string &name)
    : CudaStream(core, nullptr, "stream '" + name + "'", true),
      scratch_(core, "scratch of a stream's kernels"),
      last_(core),
      delay_(core.options, name) {
  stream_ = create(core, name_);
  core.add(*this);
  ++core.streams;
}

// CUDA may wait for a stream that is not done when it is destroyed.
LibraryStream::~LibraryStream() {
  core_.remove(*this);
  --core_.streams;
  const bool captured = core_.is_captured(stream_), marked = !captured && mark();
  const Remnant remnant{Remnant::stream, stream_};
  if (captured || (!marked && !is_known_to_be_done()))
    core_.lose_track(stream_);
  else if (!marked || await_last(last_, core_))
    core_.give_back_now(remnant);
  else
    core_.give_back(remnant);
}

// While a GPU that seems stuck has not reached an earlier mark, another mark would be useless. It could even fill the
// stream's queue, and CUDA would wait.
bool LibraryStream::mark() noexcept {
  if (core_.patience_ms() == 0 && !last_.done()) return true;
  try {
    const DeviceScope scope(core_);
    if (capture_id() == 0) last_.record(stream_, 0, name_);
    return true;
  } catch (const Error &) {
    return false;
  }
}

// Used if no event could be recorded behind the stream's work.
bool LibraryStream::is_known_to_be_done() noexcept {
  const ObjectScope scope(core_, std::nothrow);
  if (!scope) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(core_.patience_ms());
  cudaError_t code = cudaStreamQuery(stream_);
  for (; code == cudaErrorNotReady && std::chrono::steady_clock::now() < end; code = cudaStreamQuery(stream_))
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  core_.check.note(code, "cudaStreamQuery", name_);
  return code == cudaSuccess;
}

void LibraryStream::load_kernels() {
  const char *const what = "loading the library's kernels";
  const ObjectScope scope(core_);
  core_.check(static_cast<cudaError_t>(kernels::prepare(stream_, scratch_.data())), "a kernel", what);
  last_.record(stream_, 0, what);
  await_event(last_, core_, core_.waiter);
}

// Communicators enqueue work without this class; the record comes behind that work.
void LibraryStream::record(Event &event) {
  CudaStream::record(event);
  const DeviceScope scope(core_);
  after();
}

void LibraryStream::before() {
  if (core_.options.delay_us == 0) return;
  forget_word();
  core_.check(static_cast<cudaError_t>(kernels::delay(stream_, static_cast<uint32_t>(delay_.next_us()))),
              "kernel delay", name_);
}

void LibraryStream::after() {
  if (core_.options.overlap || capture_id() != 0) return;
  last_.record(stream_, 0, name_);
  await_event(last_, core_, core_.waiter);
}

void LibraryStream::with_scratch(const std::function<void(void *scratch)> &launch) {
  const DeviceScope scope(core_);
  launch(scratch_.data());
}

void CallerStream::point_at(cudaStream_t stream) {
  stream_ = stream;
  name_ =
      stream ? format_text("the caller's stream {}", static_cast<const void *>(stream)) : "the caller's stream NULL";
}

void CallerStream::after() {
  if (capture_id() == 0) last_.record(stream_, 0, name_);
}

// Kernels of two streams must not use the same scratch at the same time.
void CallerStream::with_scratch(const std::function<void(void *scratch)> &launch) {
  const DeviceScope scope(core_);
  wait(streams_.scratch_free_);
  launch(streams_.scratch_.data());
  record(streams_.scratch_free_);
}

CallerStreams::CallerStreams(Core &core) : core_(core), scratch_(core, "scratch of kernels"), scratch_free_(core) {
  for (KeptStream &slot : slots_) slot.stream = std::make_unique<CallerStream>(core, *this);
  core.add(*this);
}

CallerStream &CallerStreams::at(cudaStream_t stream) {
  const auto same = [=](const KeptStream &slot) { return slot.used != 0 && slot.stream->stream() == stream; };
  auto slot = std::find_if(slots_.begin(), slots_.end(), same);
  if (slot == slots_.end()) {
    slot = std::min_element(slots_.begin(), slots_.end(), [](auto &a, auto &b) { return a.used < b.used; });
    slot->stream->point_at(stream);
  }
  slot->used = ++clock_;
  return *slot->stream;
}

CallerStreams::~CallerStreams() { core_.remove(*this); }

}  // namespace fsdp::device::cuda
