// SPDX-License-Identifier: Apache-2.0
// Misuse of the calls on gradients, and what fsdp_finish_grads finds missing.

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

TEST(MisusedGrad, TooManyLentGroupsAreNamed) {
  for (const uint32_t pending : {1u, 2u, 3u}) {
    Scenario setup = copied_setup();
    setup.model.max_pending_groups = pending;
    Solo solo(State::published, setup);
    for (uint32_t g = 0; g < pending; ++g) EXPECT_WORKS(acquire(solo.group(3 - g), 0));
    const char *const lent[] = {"'layer.3'", "'layer.2', 'layer.3'", "'layer.1', 'layer.2', 'layer.3'"};
    const std::string names = lent[pending - 1];
    EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(0), 0), "fsdp_acquire_grad", "'layer.0'", "lent to " + names,
                 "fsdp_reduce_grad", "max_pending_groups");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(solo.group(0), 0, nullptr, 0, 0, 0, nullptr), "fsdp_put_grad",
                 "'layer.0'");
    for (uint32_t g = 0; g < pending; ++g) EXPECT_WORKS(fsdp_reduce_grad(solo.group(3 - g), 0, nullptr));
    EXPECT_WORKS(acquire(solo.group(0), 0));
    EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
    solo.clean_step();
  }
}

// Four parameters of 8 KiB, in buffers for two of them.
Scenario setup_of_parts() {
  Scenario setup;
  setup.ranks = 1;
  for (const std::string name : {"one", "two"}) {
    GroupDef group{name, {}};
    for (const char *param : {".a", ".b", ".c", ".d"}) group.params.push_back({name + param, {64, 32}});
    setup.groups.push_back(group);
  }
  setup.model.max_pending_bytes = 16384;
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  setup.complete = true;
  return setup;
}

TEST(MisusedGrad, WritingACompletedGradientIsRefused) {
  Solo solo(State::published, setup_of_parts());
  fsdp_group *const group = solo.group(1);
  const std::vector<float> data(2048);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_complete_grad(group, 3, 0, nullptr), "fsdp_complete_grad", "'two.d'", "'two'",
               "no gradient", "fsdp_acquire_grad", "fsdp_put_grad");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_complete_grad(group, 4, 0, nullptr), "param_index 4 is outside [0, 4)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_complete_grad(group, 3, FSDP_LAST, nullptr), "flags");
  EXPECT_WORKS(acquire(group, 3));
  EXPECT_WORKS(fsdp_complete_grad(group, 3, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_complete_grad(group, 3, 0, nullptr), "'two.d'", "completed",
               "fsdp_reduce_grad");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 3), "fsdp_acquire_grad", "'two.d'", "completed");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(group, 3, data.data(), FSDP_FLOAT32, 2048, 0, nullptr),
               "fsdp_put_grad", "'two.d'", "completed");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(group, FSDP_LAST, nullptr),
               "no gradient for 'two.a', 'two.b', 'two.c'");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "'two'", "acquired but not reduced");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.clean_step();
}

// Otherwise it would already have put the gradients of the groups before.
TEST(MisusedGrad, AppliedWhereTheStepTakesNoMoreTheyAreAllLeft) {
  Solo solo(State::published, setup_of_parts());
  const std::vector<float> data(2048, 1);
  const std::vector<fsdp_grad> grads(8, {data.data(), 2048, FSDP_FLOAT32, 0});
  const auto apply = [&] {
    return fsdp_apply_grads(solo.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.1, 0, nullptr, nullptr,
                            nullptr);
  };
  EXPECT_WORKS(acquire(solo.group(0), 3));
  EXPECT_WORKS(fsdp_complete_grad(solo.group(0), 3, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, apply(), "fsdp_apply_grads", "'one.d'", "'one'", "completed", "fsdp_discard_step");
  for (uint32_t p = 3; p-- > 0;) {
    EXPECT_WORKS(acquire(solo.group(0), p));
    EXPECT_WORKS(fsdp_complete_grad(solo.group(0), p, 0, nullptr));
  }
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(0), FSDP_LAST, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, apply(), "fsdp_apply_grads", "'one'", "FSDP_LAST", "fsdp_discard_step");
  EXPECT_WORKS(acquire(solo.group(1), 3));
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  // Earlier contributions do not matter for this error.
  for (uint32_t g = 2; g-- > 0;) {
    for (uint32_t p = 4; p-- > 0;) {
      EXPECT_WORKS(acquire(solo.group(g), p));
      EXPECT_WORKS(fsdp_complete_grad(solo.group(g), p, 0, nullptr));
    }
    EXPECT_WORKS(fsdp_reduce_grad(solo.group(g), 0, nullptr));
  }
  EXPECT_WORKS(apply());
}

TEST(MisusedGrad, PartsThatHaveNoRoomAreNamed) {
  Solo solo(State::published, setup_of_parts());
  fsdp_group *const group = solo.group(1);
  EXPECT_WORKS(acquire(group, 3));
  EXPECT_WORKS(acquire(group, 2));
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 1), "fsdp_acquire_grad", "'two: two.b'", "all 2",
               "'two: two.c', 'two: two.d'", "fsdp_complete_grad", "max_pending_bytes");
  fsdp_tensor grads[4] = {FSDP_TENSOR_INIT, FSDP_TENSOR_INIT, FSDP_TENSOR_INIT, FSDP_TENSOR_INIT};
  EXPECT_FAILS(FSDP_INVALID_STATE,
               fsdp_acquire_grads(solo.group(0), FSDP_GRAD_ZEROED, nullptr, grads, 4, sizeof *grads, nullptr),
               "fsdp_acquire_grads", "'one'", "4 parts", "max_pending_bytes 16384", "fsdp_complete_grad");
  EXPECT_WORKS(fsdp_complete_grad(group, 2, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 1), "fsdp_acquire_grad", "'two: two.b'", "lent to 'two: two.d'",
               "fsdp_complete_grad", "max_pending_bytes", "fsdp_set_schedule");
  EXPECT_WORKS(fsdp_complete_grad(group, 3, 0, nullptr));
  EXPECT_WORKS(acquire(group, 1));
  EXPECT_WORKS(acquire(group, 0));
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.clean_step();
}

// The error names whichever of the two limits applies.
TEST(MisusedGrad, ErrorNamesTheLimitOfPartsAtOnce) {
  Scenario setup = setup_of_parts();
  setup.model.max_pending_bytes = UINT64_MAX;
  setup.model.max_pending_groups = 1;
  Solo solo(State::published, setup);
  EXPECT_WORKS(acquire(solo.group(1), 3));
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(0), 3), "fsdp_acquire_grad", "all 1 ", "'two'",
               "max_pending_bytes 18446744073709551615 and max_pending_groups 1 ");
}

// As many as there are numbers, and one more for a root group.
TEST(MisusedGrad, AnyNumberOfGroupsMayBePending) {
  Scenario setup = setup_of_parts();
  setup.model.max_pending_bytes = 0;
  setup.model.max_pending_groups = UINT32_MAX;
  setup.groups[0].options.flags = FSDP_GROUP_ROOT;
  Solo solo(State::published, setup);
  EXPECT_WORKS(acquire(solo.group(1), 3));
  EXPECT_WORKS(acquire(solo.group(0), 3));
}

// If some gradients of a group were lent although the rest had no buffer, they would look as if they had been written.
TEST(MisusedGrad, AGroupThatFindsNoRoomIsLentNothing) {
  Scenario setup = setup_of_parts();
  for (GroupDef &group : setup.groups) group.params.resize(2);
  Solo solo(State::published, setup);
  fsdp_tensor grads[2] = {FSDP_TENSOR_INIT, FSDP_TENSOR_INIT};
  int32_t accumulate[2] = {7, 7};
  const auto acquire_one = [&] {
    return fsdp_acquire_grads(solo.group(0), 0, nullptr, grads, 2, sizeof *grads, accumulate);
  };
  EXPECT_WORKS(acquire(solo.group(1), 1));
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire_one(), "fsdp_acquire_grads", "'one: one.", "'two: two.b'");
  EXPECT_WORKS(fsdp_complete_grad(solo.group(1), 1, 0, nullptr));
  EXPECT_WORKS(acquire(solo.group(1), 0));
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr));
  EXPECT_WORKS(acquire_one());
  EXPECT_EQ(accumulate[0], 0);
  EXPECT_EQ(accumulate[1], 0);
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.clean_step();
}

TEST(MisusedGrad, InvalidArgumentsAreRefused) {
  Solo solo(State::published);
  fsdp_group *group = solo.group(0);
  const float data[32] = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, acquire(group, 2), "fsdp_acquire_grad", "param_index 2 is outside [0, 2)",
               "'alpha'");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(group, 1), "fsdp_acquire_grad", "'alpha.frozen'", "'alpha'", "FROZEN");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_put_grad(group, 1, data, FSDP_FLOAT32, 4, 0, nullptr), "fsdp_put_grad",
               "'alpha.frozen'", "FROZEN");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(group, 5, data, FSDP_FLOAT32, 32, 0, nullptr), "fsdp_put_grad",
               "param_index 5");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(group, 0, data, FSDP_FLOAT32, 31, 0, nullptr), "'alpha.w'",
               "32 elements", "element_count is 31");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(group, 0, data, 0, 32, 0, nullptr), "0 is not a dtype");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reduce_grad(group, 2, nullptr), "fsdp_reduce_grad", "flags", "0x2");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(group, FSDP_LAST, nullptr), "'alpha'", "'alpha.w'",
               "fsdp_put_grad");
  EXPECT_WORKS(acquire(solo.group(1), 0));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr), "'beta'",
               "no gradient for 'beta.b'", "fsdp_acquire_grad", "data NULL");
  EXPECT_WORKS(fsdp_put_grad(solo.group(1), 1, nullptr, 0, 0, 0, nullptr));
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(1), FSDP_LAST, nullptr), "'beta'",
               "already reduced with FSDP_LAST", "fsdp_finish_grads");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(1), 0, nullptr), "already reduced with FSDP_LAST");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(1), 0), "fsdp_acquire_grad", "'beta'", "FSDP_LAST",
               "fsdp_finish_grads");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.clean_step();
}

TEST(MisusedGrad, AStreamOfTheHostDeviceMustBeNull) {
  Solo solo(State::published, gathering_setup());
  const fsdp_stream stream = some_stream();
  double norm = 0;
  int32_t found = 0;
  const std::string pass = "pass NULL";
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_unshard(solo.group(0), FSDP_FORWARD, 0, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_prefetch(solo.group(0), FSDP_FORWARD, 0, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, acquire(solo.group(0), 0, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_put_grad(solo.group(0), 0, nullptr, 0, 0, 0, stream), pass);
  EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_FORWARD, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reshard(solo.group(0), FSDP_FORWARD, 0, stream), pass);
  EXPECT_WORKS(fsdp_reshard(solo.group(0), FSDP_FORWARD, 0, nullptr));
  forward(*solo.rank, nullptr);
  backward(*solo.rank, 0, 0, nullptr);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_reduce_grad(solo.group(0), FSDP_LAST, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_finish_grads(solo.model, 1, 0, stream), pass);
  EXPECT_WORKS(fsdp_finish_grads(solo.model, 1, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_grad_norm(solo.model, nullptr, stream, &norm), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_scale_grads(solo.model, 2, stream), pass);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_clip_grads(solo.model, nullptr, 2, stream, &norm), pass);
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
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_finish_grads(solo.model, not_a_number, 0, nullptr), "scale is nan");
  EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_FORWARD, 0, nullptr));  // a hold left, not reduced
  EXPECT_WORKS(acquire(solo.group(1), 0));                              // lent
  EXPECT_WORKS(acquire(solo.group(2), 0));
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(2), 0, nullptr));  // without LAST
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_close_context(solo.context), "fsdp_close_context", "'alpha'",
               "fsdp_discard_step");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "fsdp_finish_grads", "rank 0",
               "group 'alpha' was not reduced", "group 'beta' has gradients that were acquired but not reduced",
               "group 'gamma' was reduced without FSDP_LAST", "group 'delta' was not reduced: call fsdp_reduce_grad",
               "group 'alpha' is still held (FORWARD x 1): call fsdp_reshard", "fsdp_discard_step on every rank");
  // Until it is discarded, the step stays failed.
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(solo.group(1), FSDP_FORWARD, 0, nullptr), "fsdp_unshard",
               "fsdp_discard_step");
  EXPECT_FAILS(FSDP_INVALID_STATE, acquire(solo.group(1), 0), "must be discarded", "'gamma'");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(3), FSDP_LAST, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_publish_weights(solo.model, nullptr), "must be discarded");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_close_context(solo.context), "failed", "fsdp_discard_step");
  EXPECT_WORKS(fsdp_reshard(solo.group(0), FSDP_FORWARD, 0, nullptr));  // a guard's end, say
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "must be discarded");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reshard(solo.group(0), FSDP_FORWARD, 0, nullptr), "no FORWARD hold");
  solo.clean_step();
  EXPECT_WORKS(fsdp_close_context(solo.context));
}

// Gradients that were lent, that were reduced without FSDP_LAST and with it: the discard leaves nothing of them.
TEST(MisusedFinish, AStepAfterADiscardHasTheBitsOfAFirstOne) {
  for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST}) {
    Scenario setup = gathering_setup();
    setup.model.reduce_policy = policy;
    Solo solo(State::published, setup);
    EXPECT_WORKS(acquire(solo.group(2), 0));
    EXPECT_WORKS(fsdp_reduce_grad(solo.group(2), FSDP_LAST, nullptr));
    EXPECT_WORKS(acquire(solo.group(0), 0));
    EXPECT_WORKS(fsdp_reduce_grad(solo.group(0), 0, nullptr));
    EXPECT_WORKS(acquire(solo.group(1), 0));
    EXPECT_WORKS(fsdp_unshard(solo.group(2), FSDP_BACKWARD, 0, nullptr));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "BACKWARD x 1");
    EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
    solo.clean_step();
  }
}

TEST(MisusedFinish, BeginUpdateInAnUnfinishedStepIsRefused) {
  Solo solo(State::published, gathering_setup());
  EXPECT_WORKS(fsdp_unshard(solo.group(0), FSDP_EVAL, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", "'alpha'", "EVAL x 1",
               "fsdp_reshard");
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
  const auto expected = one_step(setup).weights;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    forward(rank, nullptr);
    backward_group(rank, 2, 0, 0, nullptr);
    backward_group(rank, 1, 0, 0, nullptr);
    if (r == 0) backward_group(rank, 0, 0, 0, nullptr);
    if (r == 1) FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(rank.model, 1, 0, nullptr), "rank 1", "'alpha' was not reduced",
                 "'beta' is still held (FORWARD x 1)", "fsdp_discard_step");
    EXPECT_WORKS(fsdp_discard_step(rank.model, nullptr));
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    EXPECT_FAILS(FSDP_MISMATCH, fsdp_finish_grads(rank.model, 1 + r, 0, nullptr), "rank 1 gave scale 2, rank 0 gave 1",
                 "fsdp_discard_step");
    EXPECT_BLAMES(1);
    EXPECT_WORKS(fsdp_discard_step(rank.model, nullptr));
    EXPECT_FAILS(FSDP_MISMATCH,
                 r ? fsdp_begin_update(rank.model, nullptr) : fsdp_finish_grads(rank.model, 1, 0, nullptr),
                 "rank 0 called fsdp_finish_grads, rank 1 called fsdp_begin_update");
    EXPECT_BLAMES(1);
    EXPECT_WORKS(fsdp_discard_step(rank.model, nullptr));
    // A rank with an exception discards while the other rank finishes: that rank gets an error, and discards too.
    forward(rank, nullptr);
    if (r == 0) {
      backward_group(rank, 2, 0, 0, nullptr);
      FSDP(fsdp_discard_step(rank.model, nullptr));
    } else {
      backward(rank, 0, 0, nullptr);
      EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(rank.model, 1, 0, nullptr), "rank 0 called fsdp_discard_step");
      FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    EXPECT_WORKS(fsdp_finish_grads(rank.model, 1, 0, nullptr));
    EXPECT_WORKS(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
    EXPECT_TRUE(same_bits(rank.read_all(), expected)) << "rank " << r;
    EXPECT_WORKS(fsdp_close_context(context));
  });
}

// Rank 0 has done all of its work; its reduce lacks only the gradient that rank 1 did not give.
TEST(MisusedFinish, ARankThatMissesAGroupIsBlamed) {
  Scenario setup = small_setup();
  setup.ranks = 2;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    forward(rank, nullptr);
    for (size_t g = 3; g-- > r;) backward_group(rank, g, 0, 0, nullptr);
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(rank.model, 1, 0, nullptr), "rank 1", "'alpha' was not reduced");
    EXPECT_BLAMES(1);
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

}  // namespace
