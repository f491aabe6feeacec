// SPDX-License-Identifier: Apache-2.0
// How threads wait for the GPU: for words that it writes, and never inside CUDA. A lane's thread must not be kept there
// by a call of another thread's that waits for the GPU, which may wait for the lane: it asks for events, and no more.
#include <algorithm>
#include <chrono>
#include <ctime>

#include "device/cuda/core.h"

namespace fsdp::device::cuda {
namespace {

using namespace std::chrono_literals;

void sleep_for(std::chrono::nanoseconds time) {
  const timespec pause{0, static_cast<long>(time.count())};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, nullptr);
}

// Polls the word often and everything else rarely.
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

// A look that failed once tells nothing, unless it says that the GPU is lost.
bool await_word(const PinnedWord &word, uint32_t count, const Core &core, uint32_t timeout_ms) noexcept {
  using std::chrono::milliseconds, std::chrono::steady_clock, std::chrono::duration_cast;
  const Failure none;  // of the context's own, nothing is to be heard here
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
