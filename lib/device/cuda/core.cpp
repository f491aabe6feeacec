// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/core.h"

#include <algorithm>
#include <chrono>
#include <ctime>

namespace fsdp::device::cuda {

using namespace std::chrono_literals;

PrimaryContext::PrimaryContext(int index, const Driver &driver, const Checker &check) : driver_(driver), check_(check) {
  const std::string what = format_text("GPU {}", index);
  check(driver.device_get(&device_, index), "cuDeviceGet", what);
  check(driver.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain", what);
}

PrimaryContext::~PrimaryContext() {
  check_.note(runtime_error(driver_.primary_context_release(device_)), "cuDevicePrimaryCtxRelease", "the GPU");
}

DeviceScope::DeviceScope(CUcontext context, const Driver &driver, const Checker &check) : driver_(driver) {
  CUcontext current = nullptr;
  check(driver.context_get_current(&current), "cuCtxGetCurrent", "the calling thread's GPU");
  if (current == context) return;
  check(driver.context_push(context), "cuCtxPushCurrent", "the calling thread's GPU");
  pushed_ = true;
}

DeviceScope::~DeviceScope() {
  CUcontext ours = nullptr;
  if (pushed_) driver_.context_pop(&ours);
}

Core::Core(int index, const Options &options, const Waiter &waiter, Failure &failure)
    : index(index),
      options(options),
      waiter(waiter),
      failure(failure),
      worker_waiter(failure, nullptr, nullptr, waiter.timeout_ms()),
      check(failure),
      driver(check),
      context(index, driver, check),
      words(check) {
  const DeviceScope scope(*this);
  check(cudaEventCreateWithFlags(&probe_, cudaEventDisableTiming), "cudaEventCreateWithFlags",
        "the event that shows a lost GPU");
}

Core::~Core() { check.note(cudaEventDestroy(probe_), "cudaEventDestroy", "the event that shows a lost GPU"); }

bool Core::drain() noexcept {
  std::lock_guard lock(mutex_);
  if (stuck_) return false;
  if (!std::all_of(workers_.begin(), workers_.end(), [](Worker *worker) { return worker->drain(); })) stuck_ = true;
  return !stuck_;
}

void Core::add(Worker &worker) {
  std::lock_guard lock(mutex_);
  workers_.push_back(&worker);
}

void Core::remove(Worker &worker) noexcept {
  if (!worker.drain()) stuck_ = true;
  std::lock_guard lock(mutex_);
  std::erase(workers_, &worker);
}

void Core::check_gpu() const {
  const DeviceScope scope(*this);
  const RelaxedScope relaxed;
  check(cudaEventQuery(probe_), "cudaEventQuery", format_text("looking whether GPU {} still works", index));
}

namespace {

void sleep_for(std::chrono::nanoseconds time) {
  const timespec pause{0, static_cast<long>(time.count())};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, nullptr);
}

// Polls the word often and everything else rarely.
void sleep_until(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter) {
  constexpr std::chrono::nanoseconds shortest = 5us, longest = 50us, look_period = 20ms;
  const auto since = std::chrono::steady_clock::now();
  auto look = since + look_period;
  for (auto pause = shortest; !word.reached(count); pause = std::min(pause * 2, longest)) {
    const auto now = std::chrono::steady_clock::now();
    waiter.failure().check();
    if (now >= look) {
      waiter.poll();
      core.check_gpu();
      look = now + look_period;
    }
    if (now - since >= std::chrono::milliseconds(waiter.timeout_ms()))
      fail(FSDP_TIMEOUT, "GPU {} did not finish the work before {} within {} ms", core.index, what,
           waiter.timeout_ms());
    sleep_for(pause);
  }
}

}  // namespace

void await_word(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter) {
  if (!spin_until([&] { return word.reached(count); }, 20us)) sleep_until(word, count, what, core, waiter);
  waiter.failure().check();
}

}  // namespace fsdp::device::cuda
