// SPDX-License-Identifier: Apache-2.0
// Misuse of the calls that load and gather, inside and outside the update window.
#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

fsdp_status get_param(fsdp_group *group, uint64_t param, fsdp_phase phase) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  return fsdp_get_param(group, param, phase, &tensor);
}

TEST(MisusedLoad, InvalidArgumentsAreRefused) {
  Solo solo(State::sealed);
  fsdp_group *group = solo.group(0);
  const float data[32] = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 2, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
               "fsdp_load_param", "param_index 2 is outside [0, 2)", "'alpha'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 31, FSDP_EVERY_RANK, 0),
               "'alpha.w'", "'alpha'", "32 elements", "element_count is 31");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, 0, 32, FSDP_EVERY_RANK, 0),
               "0 is not a dtype of alpha.w of group 'alpha', which takes float32 (1), bfloat16 (2) and float16 (3)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, 1, 0), "root 1",
               "FSDP_EVERY_RANK", "1 ranks");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, -2, 0), "root -2");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, nullptr, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
               "data is NULL", "'alpha.w'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(group, 0, nullptr, FSDP_FLOAT32, 32, 0, 0), "data is NULL",
               "rank 0");
  float out[32];
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(group, 9, out, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
               "fsdp_read_param", "param_index 9");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(group, 0, out, FSDP_FLOAT32, 33, FSDP_EVERY_RANK, 0),
               "element_count is 33");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(group, 0, out, 7, 32, FSDP_EVERY_RANK, 0), "7 is not a dtype");
  solo.rank->load();
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
               "fsdp_load_param", "window is closed", "fsdp_begin_update");
  solo.clean_step();
}

TEST(MisusedWindow, CallsBeforeTheFirstPublishAreRefused) {
  Solo solo(State::sealed, gathering_setup());
  fsdp_group *group = solo.group(0);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(group, FSDP_FORWARD, 0, nullptr), "fsdp_unshard",
               "nothing was published", "fsdp_publish_weights");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_prefetch(group, FSDP_FORWARD, 0, nullptr), "fsdp_prefetch", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, get_param(group, 0, FSDP_FORWARD), "'alpha'", "publish");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 0), "fsdp_acquire_grad", "nothing was published");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(group, 0, nullptr, FSDP_FLOAT32, 0, 0, nullptr), "fsdp_put_grad",
               "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(group, FSDP_LAST, nullptr), "fsdp_reduce_grad", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "fsdp_finish_grads", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_discard_step(solo.model, nullptr), "nothing was published",
               "fsdp_publish_weights");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "fsdp_step_adamw",
               "no gradients");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_FORWARD, 0, nullptr), "no FORWARD hold", "none");
  solo.rank->load();
  solo.clean_step();
}

TEST(MisusedWindow, CallsOnTheWrongSideOfTheWindowAreRefused) {
  Solo solo(State::published);
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_publish_weights(solo.model, nullptr), "fsdp_publish_weights",
               "window is closed", "fsdp_begin_update");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, &adamw, nullptr), "fsdp_step_adamw",
               "window is closed", "fsdp_finish_grads");
  solo.finish_step();
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(solo.group(1), FSDP_FORWARD, 0, nullptr), "fsdp_unshard",
               "window is open", "fsdp_discard_step");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_prefetch(solo.group(1), FSDP_FORWARD, 0, nullptr), "fsdp_prefetch",
               "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(1), 0), "fsdp_acquire_grad", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "fsdp_finish_grads", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", "window is open");
  EXPECT_FAILS(FSDP_INVALID_STATE,
               fsdp_apply_grads(solo.model, nullptr, 0, sizeof(fsdp_grad), 0.1, 0, nullptr, nullptr, nullptr),
               "fsdp_apply_grads", "window is open");
  EXPECT_WORKS(fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr));
  // A window without gradients.
  EXPECT_WORKS(fsdp_begin_update(solo.model, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "no gradients",
               "fsdp_finish_grads");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_scale_grads(solo.model, 2, nullptr), "fsdp_scale_grads", "no gradients");
  EXPECT_WORKS(fsdp_publish_weights(solo.model, nullptr));
  solo.clean_step();
}

TEST(MisusedGather, InvalidHoldsAndPhasesAreRefused) {
  Solo solo(State::published, gathering_setup());
  fsdp_group *group = solo.group(1);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_unshard(group, 0, 0, nullptr), "fsdp_unshard", "0 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_unshard(group, 5, 0, nullptr), "5 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reshard(group, 5, 0, nullptr), "fsdp_reshard", "5 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_prefetch(group, -1, 0, nullptr), "fsdp_prefetch", "-1 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get_param(group, 0, 9), "9 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_STATE, get_param(group, 0, FSDP_FORWARD), "'beta'", "fsdp_unshard");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_FORWARD, 0, nullptr), "'beta'", "no FORWARD hold",
               "holds are: none");
  EXPECT_WORKS(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
  EXPECT_WORKS(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
  EXPECT_WORKS(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_BACKWARD, 0, nullptr), "'beta'", "no BACKWARD hold",
               "FORWARD x 2", "EVAL x 1");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_RECOMPUTE, 0, nullptr), "no RECOMPUTE hold");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get_param(group, 2, FSDP_FORWARD), "param_index 2 is outside [0, 2)", "'beta'");
  EXPECT_WORKS(get_param(group, 1, FSDP_FORWARD));
  for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_FORWARD, FSDP_EVAL})
    EXPECT_WORKS(fsdp_reshard(group, phase, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(group, FSDP_EVAL, 0, nullptr), "no EVAL hold");
  EXPECT_FAILS(FSDP_INVALID_STATE, get_param(group, 0, FSDP_FORWARD), "fsdp_unshard");
  solo.clean_step();
}

TEST(MisusedGather, TooManyHoldsAtOnceNameBothGroups) {
  Solo solo(State::published, copied_setup());
  fsdp_status status = FSDP_OK;
  size_t held = 0;
  while (held < 4 && (status = fsdp_unshard(solo.group(held), FSDP_FORWARD, 0, nullptr)) == FSDP_OK) ++held;
  EXPECT_EQ(held, 2u);  // the schedule's own group and the one ahead
  EXPECT_FAILS(FSDP_INVALID_STATE, status, "'layer.2' (FORWARD)", "that group 'layer.0' holds (FORWARD x 1)",
               "fsdp_reshard", "fsdp_set_schedule");
  // The error cost nothing: return a hold, and the call works.
  for (size_t g = 0; g < held; ++g) EXPECT_WORKS(fsdp_reshard(solo.group(g), FSDP_FORWARD, 0, nullptr));
  EXPECT_WORKS(fsdp_unshard(solo.group(held), FSDP_FORWARD, 0, nullptr));
  EXPECT_WORKS(fsdp_reshard(solo.group(held), FSDP_FORWARD, 0, nullptr));
  solo.clean_step();
}

}  // namespace
