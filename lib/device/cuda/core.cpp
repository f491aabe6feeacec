// SPDX-License-Identifier: Apache-2.0

#include "device/cuda/core.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <thread>

namespace fsdp::device::cuda {

namespace {

struct CallOutcome {
  const char *call;
  cudaError_t code;
};

CallOutcome free_addresses(const Remnant &remnant, const Driver &driver) {
  const auto address = reinterpret_cast<CUdeviceptr>(remnant.handle);
  return {"cuMemAddressFree", runtime_error(driver.mem_address_free(address, remnant.bytes))};
}

// Reserved addresses are not memory. Once the memory is unmapped, nothing needs to be tried again.
CallOutcome unmap(const Remnant &remnant, const Core &core) {
  const auto address = reinterpret_cast<CUdeviceptr>(remnant.handle);
  const cudaError_t unmapped = runtime_error(core.driver.mem_unmap(address, remnant.bytes));
  if (unmapped != cudaSuccess) return {"cuMemUnmap", unmapped};
  const CallOutcome freed = free_addresses(remnant, core.driver);
  core.check.note(freed.code, freed.call, "addresses of the GPU's memory");
  return {freed.call, cudaSuccess};
}

CallOutcome give_back(const Remnant &remnant, const Core &core) {
  void *const handle = remnant.handle;
  switch (remnant.kind) {
    case Remnant::memory: return {"cudaFree", cudaFree(handle)};
    case Remnant::mapped_memory: return unmap(remnant, core);
    case Remnant::addresses: return free_addresses(remnant, core.driver);
    case Remnant::pinned_memory: return {"cudaFreeHost", cudaFreeHost(handle)};
    case Remnant::registered_memory: return {"cudaHostUnregister", cudaHostUnregister(handle)};
    case Remnant::stream: return {"cudaStreamDestroy", cudaStreamDestroy(static_cast<cudaStream_t>(handle))};
    case Remnant::event: return {"cudaEventDestroy", core.destroy_event(static_cast<cudaEvent_t>(handle))};
  }
  return {"nothing", cudaErrorInvalidValue};
}

}  // namespace

cudaError_t try_give_back(const Remnant &remnant, const Core &core) noexcept {
  const ObjectScope scope(core, std::nothrow);
  if (!scope) return cudaErrorNotReady;
  const CallOutcome outcome = give_back(remnant, core);
  core.check.note(outcome.code, outcome.call, "what the library had of the GPU");
  return outcome.code;
}

namespace {

std::string looking(const Core &core) { return format_text("looking whether GPU {} still works", core.index); }

}  // namespace

Core::Core(int index, const Options &options, const Waiter &waiter, Failure &failure)
    : index(index),
      options(options),
      waiter(waiter),
      failure(failure),
      worker_waiter(failure, nullptr, nullptr, waiter.timeout_ms()),
      check(failure),
      driver(check),
      context(index, driver, check),
      words(*this) {
  const char *const what = "what shows a lost GPU";
  const ObjectScope scope(*this);
  check(cudaEventCreateWithFlags(&probe_, cudaEventDisableTiming), "cudaEventCreateWithFlags", what);
  try {
    check(cudaStreamCreateWithFlags(&probe_stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", what);
  } catch (...) {
    check.note(cudaEventDestroy(probe_), "cudaEventDestroy", what);
    throw;
  }
}

Core::~Core() {
  give_back({Remnant::stream, probe_stream_});
  give_back({Remnant::event, probe_});
  leave_the_rest();
}

uint32_t Core::patience_ms() const noexcept {
  return impatient_.load(std::memory_order_relaxed) ? 0 : std::min(waiter.timeout_ms(), uint32_t{10'000});
}

// A word identifies every record, whether or not its event still exists.
bool Core::mark_all(Due &due) noexcept {
  std::lock_guard lock(mutex_);
  if (lost_for_good_ || live_capture != 0) return false;
  if (!std::all_of(sources_.begin(), sources_.end(), [](WorkSource *worker) { return worker->mark(); })) return false;
  try {
    if (!find_lost_streams()) return false;
    due.words = words.unwritten();
  } catch (...) {
    return false;
  }
  due.remnants.swap(remnants_);
  return true;
}

// Lost streams that are done are given back like other resources. Returns whether no others are left.
bool Core::find_lost_streams() {
  if (lost_streams_.empty()) return true;
  remnants_.reserve(remnants_.size() + lost_streams_.size());
  const ObjectScope scope(*this);
  std::erase_if(lost_streams_, [&](cudaStream_t stream) {
    const cudaError_t code = is_captured(stream) ? cudaErrorNotReady : cudaStreamQuery(stream);
    check.note(code, "cudaStreamQuery", "a stream that has ended");
    if (code == cudaSuccess) remnants_.push_back({Remnant::stream, stream});
    return code == cudaSuccess;
  });
  return lost_streams_.empty();
}

// Nothing is recorded behind the work of a lost stream, so the stream is queried. A stream that is captured is not
// waited for, because its work does not run.
void Core::await_lost_streams(Clock::time_point end) noexcept {
  while (lost_streams_busy()) {
    if (lost_timed_out_ || Clock::now() >= end) {
      lost_timed_out_ = true;
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  lost_timed_out_ = false;
}

bool Core::lost_streams_busy() noexcept {
  std::lock_guard lock(mutex_);
  if (lost_streams_.empty() || lost_for_good_ || live_capture != 0) return false;
  const ObjectScope scope(*this, std::nothrow);
  const auto works = [&](cudaStream_t stream) {
    if (is_captured(stream)) return false;
    const cudaError_t code = cudaStreamQuery(stream);
    check.note(code, "cudaStreamQuery", "a stream that has ended");
    return code == cudaErrorNotReady;
  };
  return scope && std::any_of(lost_streams_.begin(), lost_streams_.end(), works);
}

void Core::lose_track(cudaStream_t stream) noexcept {
  std::lock_guard lock(mutex_);
  try {
    lost_streams_.push_back(stream);
  } catch (...) {
    lost_for_good_ = true;
  }
}

bool Core::is_captured(cudaStream_t stream) const noexcept {
  const ObjectScope scope(*this, std::nothrow);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
  if (scope) check.note(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing", "a stream that has ended");
  return capture != cudaStreamCaptureStatusNone;
}

bool Core::await_all(const std::vector<AwaitedWord> &awaited, Clock::time_point end) noexcept {
  using std::chrono::milliseconds, std::chrono::duration_cast;
  late_ = {};
  for (const AwaitedWord &next : awaited) {
    const auto left = std::max(duration_cast<milliseconds>(end - Clock::now()), milliseconds(0));
    if (await_word(*next.word, next.count, *this, static_cast<uint32_t>(left.count()))) continue;
    late_ = next;
    lose_patience();
    return false;
  }
  impatient_ = false;
  return words.all_written();
}

// Resources that are kept during the wait may belong to work that is enqueued during the wait. Another thread
// is blocked only if it drains at the same time. If a GPU that was late works again, waits may take their full time
// again.
bool Core::drain() noexcept {
  std::lock_guard draining(draining_);
  if (late_.word && late_.written()) impatient_ = false;
  const auto end = Clock::now() + std::chrono::milliseconds(patience_ms());
  await_lost_streams(end);
  Due due;
  if (!mark_all(due)) return false;
  const bool idle = await_all(due.words, end);
  for (const Remnant &remnant : due.remnants)
    if (!idle || cuda::try_give_back(remnant, *this) != cudaSuccess) keep(remnant);
  return idle;
}

void Core::give_back(const Remnant &remnant) noexcept {
  if (!remnant.handle) return;
  keep(remnant);
  drain();
}

bool Core::give_back_now(const Remnant &remnant) noexcept {
  if (!remnant.handle || cuda::try_give_back(remnant, *this) == cudaSuccess) return true;
  keep(remnant);
  return false;
}

void Core::keep(const Remnant &remnant) noexcept {
  std::lock_guard lock(mutex_);
  try {
    remnants_.push_back(remnant);
  } catch (...) {  // no memory to store it: the resource is left to the process
  }
}

// After a wait for the GPU in vain, nothing here may wait again. CUDA frees the rest when the process ends.
void Core::leave_the_rest() noexcept {
  const bool idle = drain() || drain();  // a second attempt, because CUDA may now accept a call that it refused before
  if (idle) words.hand_over(*this);
  if (idle && drain() && remnants_.empty()) return;
  if (idle && drain() && remnants_.empty()) return;
  context.leave();
  uint64_t on_gpu = 0, pinned = words.bytes();
  for (const Remnant &remnant : remnants_) (remnant.on_gpu() ? on_gpu : pinned) += remnant.bytes;
  warn(on_gpu, pinned);
}

void Core::warn(uint64_t on_gpu, uint64_t pinned) const noexcept {
  if (!options.warn) return;
  try {
    options.warn(
        format_text("GPU {}: {} bytes of its memory and {} bytes of page-locked memory are left to the process: "
                    "its work did not end in time, or CUDA did not take them back",
                    index, on_gpu, pinned));
  } catch (...) {  // losing this line of the log is better than not ending
  }
}

// The lock prevents captures from beginning while marks are put on streams that could join the capture.
void Core::begin_capture(uint64_t id) {
  std::lock_guard lock(mutex_);
  uint64_t none = 0;
  if (!live_capture.compare_exchange_strong(none, id))
    fail(FSDP_INVALID_STATE, "a graph capture (CUDA's number {}) is under way in this context already", none);
}

void Core::add(WorkSource &worker) {
  std::lock_guard lock(mutex_);
  sources_.push_back(&worker);
}

void Core::remove(WorkSource &worker) noexcept {
  std::lock_guard lock(mutex_);
  std::erase(sources_, &worker);
}

// CUDA may notice a lost GPU only when it enqueues work, or queries an event that is not done. For an event that is
// done, or was never recorded, CUDA may answer without asking the GPU. So the probe has one record at a time, and only
// a GPU that accepts no more work can keep that record waiting for long.
void Core::check_gpu() const {
  const ObjectScope scope(*this);
  const std::unique_lock lock(probe_mutex_, std::try_to_lock);
  if (!lock) return;
  const std::string what = looking(*this);
  const cudaError_t code = cudaEventQuery(probe_);
  if (code == cudaErrorNotReady) return static_cast<void>(cudaGetLastError());
  check(code, "cudaEventQuery", what);
  check(cudaEventRecord(probe_, probe_stream_), "cudaEventRecord", what);
}

// As long as its word is not written, the event exists.
void Core::look_at(cudaEvent_t event, const PinnedWord &word, uint32_t count) const {
  const ObjectScope scope(*this);
  const std::unique_lock lock(probe_mutex_, std::try_to_lock);
  if (!lock || word.reached(count)) return;
  cudaError_t code = cudaEventQuery(event);
  if (code == cudaSuccess && !word.reached(count)) code = cudaStreamQuery(probe_stream_);  // the GPU may be lost
  if (code == cudaErrorNotReady) return static_cast<void>(cudaGetLastError());
  check(code, "cudaEventQuery", looking(*this));
}

cudaError_t Core::destroy_event(cudaEvent_t event) const noexcept {
  const std::lock_guard lock(probe_mutex_);
  return cudaEventDestroy(event);
}

// The guards around calls of CUDA.

PrimaryContext::PrimaryContext(int index, const Driver &driver, const Checker &check) : driver_(driver), check_(check) {
  const std::string what = format_text("GPU {}", index);
  check(driver.device_get(&device_, index), "cuDeviceGet", what);
  check(driver.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain", what);
}

PrimaryContext::~PrimaryContext() {
  if (left_) return;
  check_.note(runtime_error(driver_.primary_context_release(device_)), "cuDevicePrimaryCtxRelease", "the GPU");
}

DeviceScope::Failed DeviceScope::enter(CUcontext context) noexcept {
  CUcontext current = nullptr;
  if (const CUresult code = driver_.context_get_current(&current)) return {"cuCtxGetCurrent", code};
  if (current != context) {
    if (const CUresult code = driver_.context_push(context)) return {"cuCtxPushCurrent", code};
    pushed_ = true;
  }
  current_ = true;
  return {};
}

DeviceScope::DeviceScope(const Core &core) : driver_(core.driver) {
  const Failed failed = enter(core.context.get());
  if (failed.call) core.check(failed.code, failed.call, "the calling thread's GPU");
}

DeviceScope::DeviceScope(const Core &core, std::nothrow_t) noexcept : driver_(core.driver) {
  const Failed failed = enter(core.context.get());
  if (failed.call) core.check.note(runtime_error(failed.code), failed.call, "the calling thread's GPU");
}

DeviceScope::~DeviceScope() {
  CUcontext ours = nullptr;
  if (pushed_) driver_.context_pop(&ours);
}

// If the mode cannot be changed, the next call fails anyway. The error from here must not remain for the program to
// find.
RelaxedScope::RelaxedScope() noexcept {
  exchanged_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
  if (!exchanged_) cudaGetLastError();
}

RelaxedScope::~RelaxedScope() {
  if (exchanged_ && cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
}

// How threads wait for the GPU: they wait for words that the GPU writes, and never inside CUDA. Another thread's call
// may wait inside CUDA for the GPU, which may wait for a lane. Such a call must not block the lane's thread, so that
// thread only queries events.

namespace {

using namespace std::chrono_literals;

void sleep_for(std::chrono::nanoseconds time) {
  const timespec pause{0, static_cast<long>(time.count())};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, nullptr);
}

// Polls the word often, and everything else rarely.
void sleep_until(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter,
                 cudaEvent_t event) {
  constexpr std::chrono::nanoseconds shortest = 5us, longest = 50us, look_period = 20ms;
  const auto since = std::chrono::steady_clock::now();
  auto look = since + look_period;
  for (auto pause = shortest; !word.reached(count); pause = std::min(pause * 2, longest)) {
    const auto now = std::chrono::steady_clock::now();
    waiter.failure().check();
    if (now >= look) {
      waiter.poll();
      event ? core.look_at(event, word, count) : core.check_gpu();
      look = now + look_period;
    }
    if (now - since >= std::chrono::milliseconds(waiter.timeout_ms()))
      fail(FSDP_TIMEOUT, "GPU {} did not finish the work before {} within {} ms", core.index, what,
           waiter.timeout_ms());
    sleep_for(pause);
  }
}

}  // namespace

void await_word(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter,
                cudaEvent_t event) {
  if (!spin_until([&] { return word.reached(count); }, 20us)) sleep_until(word, count, what, core, waiter, event);
  waiter.failure().check();
}

// The error of a single check tells nothing, unless it tells that the GPU is lost.
bool await_word(const PinnedWord &word, uint32_t count, const Core &core, uint32_t timeout_ms) noexcept {
  using std::chrono::milliseconds, std::chrono::steady_clock, std::chrono::duration_cast;
  const Failure none;  // the context's own failure is ignored here
  const auto end = steady_clock::now() + milliseconds(timeout_ms);
  auto left = milliseconds(timeout_ms);
  for (; !word.reached(count) && left.count() > 0; left = duration_cast<milliseconds>(end - steady_clock::now())) {
    try {
      await_word(word, count, "the end", core, {none, nullptr, nullptr, static_cast<uint32_t>(left.count())});
    } catch (const Error &error) {
      if (error.origin == FSDP_ORIGIN_CUDA && is_sticky(static_cast<cudaError_t>(error.origin_code))) break;
    } catch (...) {
      break;
    }
  }
  return word.reached(count);
}

}  // namespace fsdp::device::cuda
