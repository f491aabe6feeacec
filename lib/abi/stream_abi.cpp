// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <thread>

#include "abi/boundary.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

// The caller's own limit ends its call alone.
void await_within(engine::Context &context, const device::Event &event, uint32_t timeout_ms, const char *call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (auto pause = std::chrono::microseconds(20); !event.done();
       pause = std::min(pause * 2, std::chrono::microseconds(1000))) {
    context.waiter().poll();
    if (std::chrono::steady_clock::now() >= end) {
      Error error(FSDP_TIMEOUT, format_text("{}: what rank {} gave the stream has not ended within timeout_ms = {}",
                                            call, context.rank(), timeout_ms));
      error.ends_context = false;
      throw error;
    }
    std::this_thread::sleep_for(pause);
  }
  context.failure().check();
}

// An event of this call's own: one that is never reached is kept by the device until its stream has ended.
void wait_stream(engine::Context &context, fsdp_stream handle, uint32_t timeout_ms, const char *call) {
  context.require_world(call);
  device::Stream &stream = context.device().caller_stream(handle);
  if (stream.is_calling_thread()) return;  // it has done all that it was given
  if (stream.capture_id() != 0)
    fail(FSDP_INVALID_STATE,
         "{}: the stream of rank {} is being captured into a graph, and nothing of that is done yet", call,
         context.rank());
  const auto end = context.device().create_event();
  stream.record(*end);
  if (timeout_ms)
    await_within(context, *end, timeout_ms, call);
  else
    context.device().synchronize(*end);
}

}  // namespace

extern "C" fsdp_status fsdp_wait_stream(fsdp_context *context, fsdp_stream stream, uint32_t timeout_ms) {
  constexpr auto call = "fsdp_wait_stream";
  return call_context(context, call, [&](auto &impl) { wait_stream(*impl, stream, timeout_ms, call); });
}
