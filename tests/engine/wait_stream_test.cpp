// SPDX-License-Identifier: Apache-2.0
// fsdp_wait_stream on the host, where there is nothing to wait for. Over simulated GPUs: gpu_wait_stream_test.cpp.
#include <gtest/gtest.h>

#include "harness.h"

using namespace harness;

namespace {

TEST(WaitStream, OnTheHostReturnsAtOnceAndTakesOnlyNull) {
  run_threads(scenario_of(FSDP_STRATEGY_NO_SHARD, 2), [](uint32_t, fsdp_context *context) {
    FSDP(fsdp_wait_stream(context, nullptr, 0));
    int handle = 0;
    require_error(fsdp_wait_stream(context, reinterpret_cast<fsdp_stream>(&handle), 0), FSDP_INVALID_ARGUMENT,
                  {"fsdp_wait_stream: the host device has no streams: pass NULL"});
    FSDP(fsdp_close_context(context));
  });
}

TEST(WaitStream, OfAFailedOrPlanningContextSaysSo) {
  run_threads(scenario_of(FSDP_STRATEGY_NO_SHARD, 1), [](uint32_t, fsdp_context *context) {
    FSDP(fsdp_abort_context(context, "no more"));
    require_error(fsdp_wait_stream(context, nullptr, 0), FSDP_ABORTED, {"no more"});
  });
  fsdp_context *plan = nullptr;
  FSDP(fsdp_create_plan_context(2, 0, nullptr, &plan));
  require_error(fsdp_wait_stream(plan, nullptr, 0), FSDP_INVALID_STATE, {"fsdp_wait_stream", "only plans"});
  fsdp_destroy_context(plan);
}

}  // namespace
