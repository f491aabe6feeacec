// SPDX-License-Identifier: Apache-2.0
// Misuse of the calls of a training step: load, gather, gradient, and the window that ends it.
#include <limits>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

fsdp_status acquire(fsdp_group *group, uint64_t param, fsdp_stream stream = nullptr) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 7;
  const fsdp_status status = fsdp_acquire_grad(group, param, stream, &grad, &accumulate);
  EXPECT_EQ(accumulate == 7, status != FSDP_OK);
  if (status == FSDP_OK && !accumulate) std::memset(grad.data, 0, grad.element_count * fsdp_get_dtype_size(grad.dtype));
  return status;
}

fsdp_status get_param(fsdp_group *group, uint64_t param, fsdp_phase phase) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  return fsdp_get_param(group, param, phase, &tensor);
}

// Copied weights in a world of one: its pool holds what the schedule needs, which is two groups of three.
Scenario copied_setup() {
  Scenario setup;
  setup.ranks = 1;
  setup.groups = equal_groups(4, 8, 4);
  setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

Scenario gathering_setup() {
  Scenario setup = small_setup();
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

TEST(MisusedLoad, Arguments) {
  Solo solo(State::sealed);
  fsdp_group *group = solo.group(0);
  const float data[32] = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 2, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK), "fsdp_load_param",
               "param_index 2 is outside [0, 2)", "'alpha'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 31, FSDP_EVERY_RANK), "'alpha.w'", "'alpha'",
               "32 elements", "element_count is 31");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, 0, 32, FSDP_EVERY_RANK), "0 is not a dtype");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, 1), "root 1", "[0, 1)", "FSDP_EVERY_RANK");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, -2), "root -2");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, nullptr, FSDP_FLOAT32, 32, FSDP_EVERY_RANK), "data is NULL", "'alpha.w'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, nullptr, FSDP_FLOAT32, 32, 0), "data is NULL", "rank 0");
  float out[32];
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(group, 9, out, FSDP_FLOAT32, 32), "fsdp_read_param", "param_index 9");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(group, 0, out, FSDP_FLOAT32, 33), "element_count is 33");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(group, 0, out, 7, 32), "7 is not a dtype");
  solo.rank->load();
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK), "fsdp_load_param",
               "window is closed", "fsdp_begin_update");
  solo.clean_step();
}

TEST(MisusedWindow, BeforeTheFirstPublish) {
  Solo solo(State::sealed, gathering_setup());
  fsdp_group *group = solo.group(0);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(group, FSDP_FORWARD, nullptr), "fsdp_unshard", "nothing was published", "fsdp_publish_weights");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_prefetch(group, FSDP_FORWARD, nullptr), "fsdp_prefetch", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, get_param(group, 0, FSDP_FORWARD), "'alpha'", "publish");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 0), "fsdp_acquire_grad", "nothing was published");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(group, 0, nullptr, FSDP_FLOAT32, 0, nullptr), "fsdp_put_grad", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(group, FSDP_LAST, nullptr), "fsdp_reduce_grad", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, nullptr), "fsdp_finish_grads", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_discard_step(solo.model, nullptr), "nothing was published", "fsdp_publish_weights");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "fsdp_step_adamw", "no gradients");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_FORWARD, nullptr), "no FORWARD hold", "none");
  solo.rank->load();
  solo.clean_step();
}

TEST(MisusedWindow, InsideAndOutside) {
  Solo solo(State::published);
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_publish_weights(solo.model, nullptr), "fsdp_publish_weights", "window is closed", "fsdp_begin_update");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, &adamw, nullptr), "fsdp_step_adamw", "window is closed", "fsdp_finish_grads");
  solo.finish_step();
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(solo.group(1), FSDP_FORWARD, nullptr), "fsdp_unshard", "window is open", "fsdp_discard_step");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_prefetch(solo.group(1), FSDP_FORWARD, nullptr), "fsdp_prefetch", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(1), 0), "fsdp_acquire_grad", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, nullptr), "fsdp_finish_grads", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_apply_grads(solo.model, nullptr, 0, 0.1, 0, nullptr, nullptr, nullptr), "fsdp_apply_grads", "window is open");
  EXPECT_WORKS(fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr));
  // A window without gradients.
  EXPECT_WORKS(fsdp_begin_update(solo.model, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "no gradients", "fsdp_finish_grads");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_scale_grads(solo.model, 2, nullptr), "fsdp_scale_grads", "no gradients");
  EXPECT_WORKS(fsdp_publish_weights(solo.model, nullptr));
  solo.clean_step();
}

TEST(MisusedGather, HoldsAndPhases) {
  Solo solo(State::published, gathering_setup());
  fsdp_group *group = solo.group(1);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_unshard(group, 0, nullptr), "fsdp_unshard", "0 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_unshard(group, 5, nullptr), "5 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reshard(group, 5, nullptr), "fsdp_reshard", "5 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_prefetch(group, -1, nullptr), "fsdp_prefetch", "-1 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get_param(group, 0, 9), "9 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_STATE, get_param(group, 0, FSDP_FORWARD), "'beta'", "fsdp_unshard");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_FORWARD, nullptr), "'beta'", "no FORWARD hold", "holds are: none");
  EXPECT_WORKS(fsdp_unshard(group, FSDP_FORWARD, nullptr));
  EXPECT_WORKS(fsdp_unshard(group, FSDP_FORWARD, nullptr));
  EXPECT_WORKS(fsdp_unshard(group, FSDP_EVAL, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_BACKWARD, nullptr), "'beta'", "no BACKWARD hold", "FORWARD x 2", "EVAL x 1");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_RECOMPUTE, nullptr), "no RECOMPUTE hold");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get_param(group, 2, FSDP_FORWARD), "param_index 2 is outside [0, 2)", "'beta'");
  EXPECT_WORKS(get_param(group, 1, FSDP_FORWARD));
  for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_FORWARD, FSDP_EVAL}) EXPECT_WORKS(fsdp_reshard(group, phase, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_EVAL, nullptr), "no EVAL hold");
  EXPECT_FAILS(FSDP_INVALID_STATE, get_param(group, 0, FSDP_FORWARD), "fsdp_unshard");
  solo.clean_step();
}

TEST(MisusedGather, TooManyHoldsAtOnceNameBothGroups) {
  Solo solo(State::published, copied_setup());
  fsdp_status status = FSDP_OK;
  size_t held = 0;
  while (held < 4 && (status = fsdp_unshard(solo.group(held), FSDP_FORWARD, nullptr)) == FSDP_OK) ++held;
  EXPECT_GE(held, 1u);
  EXPECT_FAILS(FSDP_INVALID_STATE, status, "'layer." + std::to_string(held) + "' (FORWARD)", "that group 'layer.", "holds (FORWARD x 1)",
               "fsdp_reshard", "fsdp_set_schedule");
  // The error cost nothing: return a hold, and the call works.
  for (size_t g = 0; g < held; ++g) EXPECT_WORKS(fsdp_reshard(solo.group(g), FSDP_FORWARD, nullptr));
  EXPECT_WORKS(fsdp_unshard(solo.group(held), FSDP_FORWARD, nullptr));
  EXPECT_WORKS(fsdp_reshard(solo.group(held), FSDP_FORWARD, nullptr));
  solo.clean_step();
}

TEST(MisusedGrad, TooManyLentGroupsAreNamed) {
  for (const uint32_t pending : {1u, 2u}) {
    Scenario setup = copied_setup();
    setup.model.max_pending_groups = pending;
    Solo solo(State::published, setup);
    for (uint32_t g = 0; g < pending; ++g) EXPECT_WORKS(acquire(solo.group(3 - g), 0));
    const std::string names = pending == 1 ? "'layer.3'" : "'layer.2', 'layer.3'";
    EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(0), 0), "fsdp_acquire_grad", "'layer.0'", "lent to " + names,
                 "fsdp_reduce_grad", "max_pending_groups");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(solo.group(0), 0, nullptr, 0, 0, nullptr), "fsdp_put_grad", "'layer.0'");
    for (uint32_t g = 0; g < pending; ++g) EXPECT_WORKS(fsdp_reduce_grad(solo.group(3 - g), 0, nullptr));
    EXPECT_WORKS(acquire(solo.group(0), 0));
    EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
    solo.clean_step();
  }
}

TEST(MisusedGrad, Arguments) {
  Solo solo(State::published);
  fsdp_group *group = solo.group(0);
  const float data[32] = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, acquire(group, 2), "fsdp_acquire_grad", "param_index 2 is outside [0, 2)", "'alpha'");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 1), "fsdp_acquire_grad", "'alpha.frozen'", "'alpha'", "FROZEN");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(group, 1, data, FSDP_FLOAT32, 4, nullptr), "fsdp_put_grad", "'alpha.frozen'", "FROZEN");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(group, 5, data, FSDP_FLOAT32, 32, nullptr), "fsdp_put_grad", "param_index 5");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(group, 0, data, FSDP_FLOAT32, 31, nullptr), "'alpha.w'", "32 elements", "element_count is 31");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(group, 0, data, 0, 32, nullptr), "0 is not a dtype");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reduce_grad(group, 2, nullptr), "fsdp_reduce_grad", "flags", "0x2");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(group, FSDP_LAST, nullptr), "'alpha'", "'alpha.w'", "fsdp_put_grad");
  EXPECT_WORKS(acquire(solo.group(1), 0));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr), "'beta'", "no gradient for 'beta.b'", "fsdp_acquire_grad", "data NULL");
  EXPECT_WORKS(fsdp_put_grad(solo.group(1), 1, nullptr, 0, 0, nullptr));
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr), "'beta'", "already reduced with FSDP_LAST", "fsdp_finish_grads");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(1), 0, nullptr), "already reduced with FSDP_LAST");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(1), 0), "fsdp_acquire_grad", "'beta'", "FSDP_LAST", "fsdp_finish_grads");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.clean_step();
}

TEST(MisusedGrad, AStreamOfTheHostDeviceMustBeNull) {
  Solo solo(State::published, gathering_setup());
  const fsdp_stream stream = some_stream();
  double norm = 0;
  int32_t found = 0;
  const std::string pass = "pass NULL";
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_unshard(solo.group(0), FSDP_FORWARD, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_prefetch(solo.group(0), FSDP_FORWARD, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, acquire(solo.group(0), 0, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(solo.group(0), 0, nullptr, 0, 0, stream), pass);
  EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_FORWARD, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reshard(solo.group(0), FSDP_FORWARD, stream), pass);
  EXPECT_WORKS(fsdp_reshard(solo.group(0), FSDP_FORWARD, nullptr));
  forward(*solo.rank, nullptr);
  backward(*solo.rank, 0, 0, nullptr);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reduce_grad(solo.group(0), FSDP_LAST, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_finish_grads(solo.model, 1, stream), pass);
  EXPECT_WORKS(fsdp_finish_grads(solo.model, 1, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_grad_norm(solo.model, stream, &norm), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_scale_grads(solo.model, 2, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_clip_grads(solo.model, 2, stream, &norm), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_check_grads(solo.model, stream, &found, nullptr), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_step_adamw(solo.model, 0.1, nullptr, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_publish_weights(solo.model, stream), pass);
  EXPECT_WORKS(fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_begin_update(solo.model, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_discard_step(solo.model, stream), pass);
  solo.clean_step();
}

TEST(MisusedFinish, ListsAllThatIsMissing) {
  Scenario setup = gathering_setup();
  setup.groups.push_back({"delta", {{"delta.w", {3}}}});
  Solo solo(State::published, setup);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_finish_grads(solo.model, nan, nullptr), "scale is nan");
  EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_FORWARD, nullptr));  // a hold left, not reduced
  EXPECT_WORKS(acquire(solo.group(1), 0));                           // lent
  EXPECT_WORKS(acquire(solo.group(2), 0));
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(2), 0, nullptr));  // without LAST
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_close_context(solo.context), "fsdp_close_context", "'alpha'", "fsdp_discard_step");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, nullptr), "fsdp_finish_grads", "rank 0",
               "group 'alpha' was not reduced", "group 'beta' has gradients that were acquired but not reduced",
               "group 'gamma' was reduced without FSDP_LAST", "group 'delta' was not reduced: call fsdp_reduce_grad",
               "group 'alpha' is still held (FORWARD x 1): call fsdp_reshard", "fsdp_discard_step on every rank");
  // Until it is discarded, the step stays failed.
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(solo.group(1), FSDP_FORWARD, nullptr), "fsdp_unshard", "fsdp_discard_step");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(1), 0), "must be discarded", "'gamma'");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(3), FSDP_LAST, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_publish_weights(solo.model, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_close_context(solo.context), "failed", "fsdp_discard_step");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(solo.group(0), FSDP_FORWARD, nullptr), "no FORWARD hold");
  solo.clean_step();
  EXPECT_WORKS(fsdp_close_context(solo.context));
}

// The same step in a model that never misused anything has the same bits.
TEST(MisusedFinish, AStepAfterADiscardHasTheBitsOfAFirstOne) {
  std::vector<std::vector<float>> weights;
  for (const bool misuse : {false, true}) {
    Solo solo(State::published, gathering_setup());
    if (misuse) {
      EXPECT_WORKS(acquire(solo.group(1), 0));
      EXPECT_WORKS(fsdp_unshard(solo.group(2), FSDP_BACKWARD, nullptr));
      EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, nullptr), "BACKWARD x 1");
      EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
    }
    solo.clean_step();
    weights.push_back(solo.rank->read(1, 0));
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST(MisusedFinish, BeginUpdateWithAnUnfinishedStep) {
  Solo solo(State::published, gathering_setup());
  EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_EVAL, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", "'alpha'", "EVAL x 1", "fsdp_reshard");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  EXPECT_WORKS(acquire(solo.group(1), 0));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "'beta'", "gradients of an unfinished step");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  EXPECT_WORKS(fsdp_begin_update(solo.model, nullptr));
  EXPECT_WORKS(fsdp_publish_weights(solo.model, nullptr));
  solo.clean_step();
}

// One rank's mistake is listed on both, with that rank's number.
TEST(MisusedFinish, WhatOneRankMissesIsListedOnAll) {
  Scenario setup = small_setup();
  setup.ranks = 2;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    forward(rank, nullptr);
    backward_group(rank, 2, 0, 0, nullptr);
    backward_group(rank, 1, 0, 0, nullptr);
    if (r == 0) backward_group(rank, 0, 0, 0, nullptr);
    if (r == 1) FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(rank.model, 1, nullptr), "rank 1", "'alpha' was not reduced",
                 "'beta' is still held (FORWARD x 1)", "fsdp_discard_step");
    EXPECT_WORKS(fsdp_discard_step(rank.model, nullptr));
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    EXPECT_FAILS(FSDP_MISMATCH, fsdp_finish_grads(rank.model, 1 + r, nullptr), r ? "rank 0 gave scale 1" : "rank 1 gave scale 2", "fsdp_discard_step");
    EXPECT_WORKS(fsdp_discard_step(rank.model, nullptr));
    EXPECT_FAILS(FSDP_MISMATCH, r ? fsdp_begin_update(rank.model, nullptr) : fsdp_finish_grads(rank.model, 1, nullptr),
                 r ? "rank 0 called fsdp_finish_grads" : "rank 1 called fsdp_begin_update");
    EXPECT_WORKS(fsdp_discard_step(rank.model, nullptr));
    // A rank that met an exception discards while the other one finishes: that one is told, and discards too.
    forward(rank, nullptr);
    if (r == 0) {
      backward_group(rank, 2, 0, 0, nullptr);
      FSDP(fsdp_discard_step(rank.model, nullptr));
    } else {
      backward(rank, 0, 0, nullptr);
      EXPECT_FAILS(FSDP_MISMATCH, fsdp_finish_grads(rank.model, 1, nullptr), "rank 0 called fsdp_discard_step");
      FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    EXPECT_WORKS(fsdp_finish_grads(rank.model, 1, nullptr));
    EXPECT_WORKS(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
    EXPECT_WORKS(fsdp_close_context(context));
  });
}

}  // namespace
