// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/call.h"

#include "simulated_cuda/capture.h"

namespace simulated {
namespace {

// If a thread without a context makes a call, the primary context of the device that it chose becomes current.
void bind_context(Thread &thread) {
  if (!thread.contexts.empty()) return;
  thread.contexts.push_back(thread.chosen);
  ++runtime().implicit_contexts;
  runtime().current().used = true;
}

}  // namespace

cudaError_t admit(const char *name, Need need) {
  Runtime &process = runtime();
  const int planned = process.calls.count(name);
  if (planned) return static_cast<cudaError_t>(planned);
  if (process.forked()) return cudaErrorInitializationError;
  if (this_thread().in_host_function) return cudaErrorNotPermitted;
  if (!need.device) return cudaSuccess;
  if (process.device_count() == 0) return cudaErrorNoDevice;
  if (need.context) bind_context(this_thread());
  if (const cudaError_t error = process.current().error(); error && !need.lost) return error;
  return need.outside_capture ? refuse_unsafe_call() : cudaSuccess;
}

}  // namespace simulated
