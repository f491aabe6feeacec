// SPDX-License-Identifier: Apache-2.0
// Every call is made on a context that was destroyed, or whose job another rank aborted while this one did not wait.
#include <set>
#include <string>
#include <thread>

#include "every_call.h"
#include "misuse.h"

using namespace harness;
using namespace misuse;
using namespace every_call;

namespace {

// Two ranks that are threads. Rank 0 has what a call may be given: a model and a group, not sealed, and a checkpoint.
class Pair {
 public:
  Pair() {
    FSDP(fsdp_create_local_contexts(2, nullptr, contexts));
    FSDP(fsdp_create_model(contexts[0], nullptr, &model));
    fsdp_param param = FSDP_PARAM_INIT;
    const uint64_t shape[] = {8, 4};
    param.name = "alpha.w";
    param.shape = shape;
    param.dimension_count = 2;
    FSDP(fsdp_create_group(model, "alpha", &param, 1, sizeof param, nullptr, &group));
    FSDP(fsdp_begin_checkpoint(contexts[0], "folder", nullptr, &checkpoint));
  }
  ~Pair() {
    fsdp_destroy_checkpoint(checkpoint);
    fsdp_destroy_model(model);
    for (fsdp_context *context : contexts) fsdp_destroy_context(context);
  }
  // The calls of rank 0, through handles whose context may be destroyed.
  std::vector<Call> calls() const {
    std::vector<Call> all = model_calls(model, checkpoint);
    for (const auto &more : {group_calls(group), checkpoint_calls(checkpoint, model)})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  fsdp_context *contexts[2] = {};
  fsdp_model *model = nullptr;
  fsdp_group *group = nullptr;
  fsdp_checkpoint *checkpoint = nullptr;
};

TEST(DestroyedContext, IsInvalidHandleInEveryCallOnItsObjects) {
  const Pair pair;
  fsdp_destroy_context(pair.contexts[0]);
  for (const Call &call : pair.calls())
    EXPECT_TRUE(fails(call.run(), FSDP_INVALID_HANDLE, {call.name, "the context of rank 0", "destroyed"})) << call.name;
}

TEST(DestroyedContext, IsInvalidHandleAlsoAfterAFailure) {
  const Pair pair;
  FSDP(fsdp_abort_context(pair.contexts[0], "test"));
  EXPECT_FAILS(FSDP_ABORTED, fsdp_seal_model(pair.model), "test");
  fsdp_destroy_context(pair.contexts[0]);
  for (const Call &call : pair.calls())
    EXPECT_TRUE(fails(call.run(), FSDP_INVALID_HANDLE, {call.name, "the context of rank 0", "destroyed"})) << call.name;
}

// A model of a destroyed context is refused by the checkpoint of another one.
TEST(DestroyedContext, IsInvalidHandleWhenAnotherContextGetsItsModel) {
  const Pair pair, other;
  fsdp_destroy_context(pair.contexts[0]);
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_add_checkpoint_model(other.checkpoint, "model", pair.model),
               "context of rank 0", "destroyed");
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_load_checkpoint_model(pair.checkpoint, "model", other.model, nullptr, nullptr),
               "context of rank 0", "destroyed");
}

// These calls answer from any thread while another call runs, even if the job has ended.
const std::set<std::string> answer_always = {
    "fsdp_abort_context",     "fsdp_get_rank",         "fsdp_get_world_size", "fsdp_get_last_error",
    "fsdp_get_context_error", "fsdp_get_failed_ranks", "fsdp_write_trace",    "fsdp_write_flight_record",
    "fsdp_get_group_count",   "fsdp_get_group",        "fsdp_find_group",     "fsdp_get_group_info",
    "fsdp_find_param",        "fsdp_get_param_info",   "fsdp_get_chunk",      "fsdp_get_checkpoint_status"};

std::vector<Call> all_calls(const Pair &pair) {
  std::vector<Call> all = pair.calls();
  const std::vector<Call> more = context_calls(pair.contexts[0]);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Each call has its own job, because after the first call that finds the failure all later calls know it.
TEST(AbortedJob, IsSeenByEveryCallThatDoesWork) {
  const size_t count = all_calls(Pair()).size();
  for (size_t i = 0; i < count; ++i) {
    const Pair pair;
    const Call call = all_calls(pair)[i];
    if (answer_always.contains(call.name)) continue;
    FSDP(fsdp_abort_context(pair.contexts[1], "test"));
    EXPECT_TRUE(fails(call.run(), FSDP_PEER_FAILED, {"rank 1 aborted: test"})) << call.name;
    EXPECT_BLAMES(1) << call.name;
    EXPECT_EQ(last_error().context_failed, 1) << call.name;
  }
}

TEST(AbortedJob, IsSeenByGettersOfFailures) {
  const Pair first, second, third;
  for (const Pair *pair : {&first, &second, &third}) FSDP(fsdp_abort_context(pair->contexts[1], "test"));
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_WORKS(fsdp_get_context_error(first.contexts[0], &error));
  EXPECT_EQ(error.status, FSDP_PEER_FAILED);
  EXPECT_EQ(error.rank, 1);
  EXPECT_EQ(error.context_failed, 1);
  EXPECT_NE(std::string(error.message).find("rank 1 aborted: test"), std::string::npos) << error.message;
  uint32_t rank = 7;
  uint64_t ranks = 1;
  EXPECT_WORKS(fsdp_get_failed_ranks(second.contexts[0], &rank, &ranks));
  EXPECT_EQ(ranks, 1u);
  EXPECT_EQ(rank, 1u);
  EXPECT_EQ(last_error(third.contexts[0]).context_failed, 1);
}

// Programs that end destroy their contexts in any order: a peer that waits for none of them goes on.
TEST(DestroyedContext, OfAnotherRankDoesNotFailARankThatWaitsForNoPeer) {
  const Pair pair;
  fsdp_destroy_context(pair.contexts[1]);
  fsdp_model *made = nullptr;
  EXPECT_WORKS(fsdp_create_model(pair.contexts[0], nullptr, &made));
  fsdp_destroy_model(made);
  uint64_t ranks = 7;
  EXPECT_WORKS(fsdp_get_failed_ranks(pair.contexts[0], nullptr, &ranks));
  EXPECT_EQ(ranks, 0u);
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_WORKS(fsdp_get_context_error(pair.contexts[0], &error));
  EXPECT_EQ(error.status, FSDP_OK);
  double one = 1;
  EXPECT_FAILS(FSDP_PEER_FAILED, fsdp_all_reduce_values(pair.contexts[0], nullptr, &one, 1, FSDP_VALUE_SUM),
               "rank 1 aborted: destroyed its context without fsdp_close_context");
}

// A closed context has left the job, so a later failure of the job is not its own.
TEST(AbortedJob, IsNoFailureOfAContextThatWasClosed) {
  fsdp_context *contexts[2] = {};
  FSDP(fsdp_create_local_contexts(2, nullptr, contexts));
  std::thread other([&] { EXPECT_WORKS(fsdp_close_context(contexts[1])); });
  EXPECT_WORKS(fsdp_close_context(contexts[0]));
  other.join();
  FSDP(fsdp_abort_context(contexts[1], "late"));
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_WORKS(fsdp_get_context_error(contexts[0], &error));
  EXPECT_EQ(error.status, FSDP_OK);
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
}

}  // namespace
