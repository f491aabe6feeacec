// SPDX-License-Identifier: Apache-2.0
// Debug mode over simulated GPUs: a kernel that writes into a gradient after fsdp_reduce_grad is told, with the group's
// name.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "device.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

constexpr auto told = "a kernel wrote into the gradients of group 'layer.1' after fsdp_reduce_grad";

Scenario watched(fsdp_dtype dtype, uint64_t rows = 16) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, 0);
  setup.groups = equal_groups(3, rows, 8);
  setup.set_dtype(dtype);
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_STAGING;
  setup.context.flags = FSDP_CONTEXT_DEBUG;
  return setup;
}

// A kernel writes one byte at the end of the lent gradient.
void write_late(void *last) {
  require(simulated::enqueue(static_cast<cudaStream_t>(stream()),
                             [last] { *static_cast<unsigned char *>(last) = 0x3F; }) == cudaSuccess,
          "a kernel");
  require(cudaStreamSynchronize(static_cast<cudaStream_t>(stream())) == cudaSuccess, "its end");
}

void *lend(Rank &rank, size_t group) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[group], 0, FSDP_GRAD_ZEROED, stream(), &grad, &accumulate));
  return static_cast<char *>(grad.data) + grad.element_count * fsdp_get_dtype_size(grad.dtype) - 1;
}

// The last byte of group 1's gradient.
void *give_all(Rank &rank) {
  void *last = nullptr;
  for (size_t g = rank.groups.size(); g-- > 0;) {
    void *const end = lend(rank, g);
    if (g == 1) last = end;
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
  }
  return last;
}

// The byte is written between the steps, and found when the buffer is lent again: once.
TEST(LateWrite, BetweenStepsIsReportedWhenTheGradientIsLentAgain) {
  for (const auto &[dtype, limit] : {std::pair(FSDP_FLOAT32, 0), {FSDP_BFLOAT16, 0}, {FSDP_FLOAT32, 1 << 20}}) {
    Scenario setup = watched(dtype);
    setup.model.max_pending_bytes = static_cast<uint64_t>(limit);
    const char *const what =
        limit ? "the gradients of group 'layer.1' after fsdp_complete_grad or fsdp_reduce_grad" : told;
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      void *const last = give_all(rank);
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
      if (r == 1) write_late(last);
      lend(rank, 2);
      FSDP(fsdp_reduce_grad(rank.groups[2], FSDP_LAST, stream()));
      fsdp_tensor grad = FSDP_TENSOR_INIT;
      int32_t accumulate = 0;
      if (r == 1)
        require_error(fsdp_acquire_grad(rank.groups[1], 0, 0, stream(), &grad, &accumulate), FSDP_INVALID_STATE,
                      {"fsdp_acquire_grad", what});
      for (const size_t g : {1u, 0u}) {
        lend(rank, g);
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
      }
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
      give_all(rank);
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      FSDP(fsdp_discard_step(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

// Group 1's buffer is drained when group 0 needs one; the byte comes afterwards, and all ranks learn it where the step
// ends.
TEST(LateWrite, WithinAStepIsReportedToAllRanksAtItsEnd) {
  // The gradient has more bytes than one piece of the search.
  Scenario setup = watched(FSDP_FLOAT32, 70'000);
  setup.model.max_pending_groups = 1;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    void *const last = give_all(rank);
    if (r == 0) write_late(last);
    require_error(fsdp_finish_grads(rank.model, 1, 0, stream()), FSDP_INVALID_STATE,
                  {"rank 0", told, "fsdp_discard_step"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    give_all(rank);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
