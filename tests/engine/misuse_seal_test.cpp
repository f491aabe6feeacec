// SPDX-License-Identifier: Apache-2.0
// Seals that fail on one rank or on all: every rank learns it, nothing leaks, and another seal may follow.
#include <atomic>
#include <filesystem>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

class FailedAllocation : public testing::TestWithParam<uint64_t> {};

// Private memory fails on every rank alike; all learn it at the seal, nothing leaks, and the context goes on.
TEST_P(FailedAllocation, AtTheSealIsOutOfMemoryOnEveryRank) {
  Scenario setup = small_setup_of(2);
  setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
  for (GroupDef &group : setup.groups) group.params[0].dtype = FSDP_BFLOAT16;  // so that there are main weights
  const uint64_t allocations = train_threads(setup)[0].stats.allocations;
  ASSERT_TRUE(allocations > 4 && allocations < 12) << allocations << ": some of the cases must fail, and one must not";
  const size_t before = open_descriptors();
  setup.context.debug_failed_allocation = GetParam();
  setup.steps = 1;
  const auto expected = reference(setup).weights;
  std::atomic<int> failed{0};
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup, false);
    const fsdp_status status = fsdp_seal_model(rank.model);
    if (status == FSDP_OK) return;  // fewer allocations than that
    ++failed;
    EXPECT_FAILS(FSDP_OUT_OF_MEMORY, status, "allocation", "debug_failed_allocation");
    EXPECT_EQ(last_error().context_failed, 0);
    fsdp_stats stats = FSDP_STATS_INIT;
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_stats(rank.model, &stats), "not sealed");
    Rank again(context, setup);  // the allocation that failed was the n-th, later ones do not
    again.load();
    clean_step(again, 0);
    EXPECT_TRUE(same_bits(again.read_all(), expected));
    FSDP(fsdp_close_context(context));
  });
  EXPECT_EQ(failed, GetParam() <= allocations ? 2 : 0) << "of " << allocations << " allocations";
  EXPECT_EQ(open_descriptors(), before);
  setup.context.debug_failed_allocation = 0;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
  EXPECT_EQ(open_descriptors(), before);
}

INSTANTIATE_TEST_SUITE_P(NthOfTwelve, FailedAllocation, testing::Range(uint64_t{1}, uint64_t{13}));

// A seal that only one rank cannot finish: the other one learns whose memory it was.
TEST(FailedSeal, TooSmallArenaOfOneRankFailsTheSealOnAll) {
  Scenario setup = small_setup_of(2);
  setup.steps = 1;
  const auto expected = reference(setup).weights;
  alignas(4096) static char arena[4096];
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup, false);
    if (r == 1) FSDP(fsdp_set_arena(rank.model, FSDP_ROLE_OPTIMIZER, arena, 64));
    const fsdp_status status = fsdp_seal_model(rank.model);
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, status, "fsdp_set_arena", "64 bytes", "rank 1");
    EXPECT_EQ(last_error().rank, 1);
    if (r == 1) FSDP(fsdp_set_arena(rank.model, FSDP_ROLE_OPTIMIZER, arena, sizeof arena));
    EXPECT_WORKS(fsdp_seal_model(rank.model));
    rank.load();
    clean_step(rank, 0);
    EXPECT_TRUE(same_bits(rank.read_all(), expected)) << "rank " << r;
    EXPECT_WORKS(fsdp_close_context(context));
  });
}

TEST(FailedSeal, DifferentDeclarationsFailTheSealOnAll) {
  Scenario setup = small_setup_of(2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Scenario own = setup;
    if (r == 1) own.groups[1].params[0].shape = {6, 5};
    Rank rank(context, own, false);
    EXPECT_FAILS(FSDP_MISMATCH, fsdp_seal_model(rank.model), "fsdp_seal_model", "rank 0 has parameter 'beta.w'",
                 "[6, 4]", "rank 1 has", "[6, 5]");
    EXPECT_EQ(last_error().rank, 1);
  });
}

}  // namespace
