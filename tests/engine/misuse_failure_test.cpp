// SPDX-License-Identifier: Apache-2.0
// Two threads in a context, abort, interruption, timeout, fork, failed allocations: every wait ends, with the right
// status.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>
#include <utility>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

using std::chrono::steady_clock;

fsdp_status enter(fsdp_context *context) {
  double value = 1;
  return fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM);
}

// The same while another thread tries to enter.
fsdp_status enter_patiently(fsdp_context *context) {
  fsdp_status status = FSDP_BUSY;
  while ((status = enter(context)) == FSDP_BUSY) std::this_thread::yield();
  return status;
}

// A call that only tries to enter the context.
fsdp_status knock(fsdp_context *context) {
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.shard_size = 999;
  fsdp_mesh *mesh = nullptr;
  return fsdp_create_mesh(context, &options, &mesh);
}

// Until another thread is inside the context.
bool await_busy(fsdp_context *context) {
  const auto end = steady_clock::now() + std::chrono::seconds(30);
  while (steady_clock::now() < end) {
    if (knock(context) == FSDP_BUSY) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(MisusedThreads, ASecondThreadIsBusy) {
  fsdp_context *contexts[2] = {};
  const Scenario setup = small_setup_of(2);
  FSDP(fsdp_create_local_contexts(2, &setup.context, contexts));
  std::thread waiting([&] { EXPECT_WORKS(enter_patiently(contexts[0])); });
  EXPECT_TRUE(await_busy(contexts[0]));
  EXPECT_FAILS(FSDP_BUSY, enter(contexts[0]), "another thread", "rank 0");
  fsdp_model *model = reinterpret_cast<fsdp_model *>(1);
  EXPECT_FAILS(FSDP_BUSY, fsdp_create_model(contexts[0], nullptr, &model), "another thread");
  EXPECT_EQ(model, nullptr);
  EXPECT_EQ(last_error(contexts[0]).status, FSDP_BUSY);
  EXPECT_EQ(last_error(contexts[1]).status, FSDP_OK);
  EXPECT_EQ(last_error().context_failed, 0);
  // Another thread's error is not this one's.
  std::thread([] { EXPECT_EQ(last_error().status, FSDP_OK); }).join();
  // Getters are let in.
  uint32_t number = 7;
  EXPECT_WORKS(fsdp_get_rank(contexts[0], &number));
  EXPECT_EQ(number, 0u);
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_WORKS(fsdp_get_context_error(contexts[0], &error));
  EXPECT_EQ(error.status, FSDP_OK);
  EXPECT_WORKS(enter(contexts[1]));
  waiting.join();
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
}

// Ranks 0 and 1 wait for rank 2, which never comes.
TEST(MisusedThreads, AbortWakesWaitingCallsEverywhere) {
  fsdp_context *contexts[3] = {};
  const Scenario setup = small_setup_of(3);
  FSDP(fsdp_create_local_contexts(3, &setup.context, contexts));
  std::thread first([&] {
    EXPECT_FAILS(FSDP_ABORTED, enter_patiently(contexts[0]), "rank 0 aborted: the test says so");
    EXPECT_EQ(last_error().context_failed, 1);
  });
  std::thread second([&] {
    EXPECT_FAILS(FSDP_PEER_FAILED, enter_patiently(contexts[1]), "rank 0", "the test says so");
    EXPECT_EQ(last_error().rank, 0);
    EXPECT_EQ(last_error().context_failed, 1);
  });
  EXPECT_TRUE(await_busy(contexts[0]) && await_busy(contexts[1]));
  const auto start = steady_clock::now();
  EXPECT_WORKS(fsdp_abort_context(contexts[0], "the test says so"));
  first.join();
  second.join();
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_FAILS(FSDP_PEER_FAILED, enter(contexts[2]), "rank 0", "the test says so");
  // The failure is sticky, and the same from every call.
  EXPECT_FAILS(FSDP_ABORTED, enter(contexts[0]), "the test says so");
  EXPECT_FAILS(FSDP_ABORTED, knock(contexts[0]), "the test says so");
  EXPECT_FAILS(FSDP_ABORTED, fsdp_close_context(contexts[0]), "the test says so");
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_WORKS(fsdp_get_context_error(contexts[0], &error));
  EXPECT_EQ(error.status, FSDP_ABORTED);
  EXPECT_EQ(error.context_failed, 1);
  EXPECT_WORKS(fsdp_get_context_error(contexts[1], &error));
  EXPECT_EQ(error.status, FSDP_PEER_FAILED);
  EXPECT_WORKS(fsdp_abort_context(contexts[0], nullptr));  // the first reason stays
  EXPECT_FAILS(FSDP_ABORTED, enter(contexts[0]), "the test says so");
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
}

TEST(MisusedThreads, DestroyWakesAWaitingCall) {
  fsdp_context *contexts[3] = {};
  const Scenario setup = small_setup_of(3);
  FSDP(fsdp_create_local_contexts(3, &setup.context, contexts));
  std::thread first([&] { EXPECT_FAILS(FSDP_INVALID_HANDLE, enter_patiently(contexts[0]), "rank 0", "destroyed"); });
  std::thread second([&] {
    EXPECT_FAILS(FSDP_PEER_FAILED, enter_patiently(contexts[1]), "rank 0", "fsdp_close_context");
    EXPECT_EQ(last_error().rank, 0);
  });
  EXPECT_TRUE(await_busy(contexts[0]) && await_busy(contexts[1]));
  fsdp_destroy_context(contexts[0]);
  first.join();
  second.join();
  fsdp_destroy_context(contexts[1]);
  fsdp_destroy_context(contexts[2]);
}

thread_local bool impatient = false;
int32_t is_impatient(void *calls) {
  ++*static_cast<std::atomic<int> *>(calls);
  return impatient;
}

TEST(MisusedThreads, TheInterruptedHookEndsAWait) {
  std::atomic<int> calls{0};
  Scenario setup = small_setup_of(2);
  setup.context.interrupted = is_impatient;
  setup.context.interrupted_data = &calls;
  std::atomic<bool> given_up{false};
  run_threads(setup, [&](uint32_t rank, fsdp_context *context) {
    if (rank == 0) {
      impatient = true;
      EXPECT_FAILS(FSDP_INTERRUPTED, enter(context), "interrupted hook");
      EXPECT_FAILS(FSDP_INTERRUPTED, knock(context), "interrupted hook");
      EXPECT_EQ(last_error().context_failed, 1);
      given_up = true;
      return;
    }
    while (!given_up) std::this_thread::yield();
    // What rank 0 gave before it gave up still counts; it takes part in nothing more.
    fsdp_status status = enter(context);
    if (status == FSDP_OK) status = enter(context);
    EXPECT_FAILS(FSDP_PEER_FAILED, status, "rank 0");
    EXPECT_EQ(last_error().rank, 0);
  });
  EXPECT_GT(calls, 0);
}

// Another thread sets the flag while the call waits. A flag that is not set, and a NULL flag, change nothing.
TEST(MisusedThreads, TheInterruptedFlagEndsAWait) {
  int32_t flag = 0;
  Scenario setup = small_setup_of(2);
  run_threads(setup, [](uint32_t, fsdp_context *context) { FSDP(enter(context)); });  // NULL: none
  setup.context.interrupted_flag = &flag;
  std::atomic<bool> waits{false};
  run_threads(setup, [&](uint32_t rank, fsdp_context *context) {
    FSDP(enter(context));  // not set: nothing changes
    if (rank == 1) {
      while (!waits) std::this_thread::yield();
      pause_ms(100);
      __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
      return;
    }
    const auto start = steady_clock::now();
    waits = true;
    EXPECT_FAILS(FSDP_INTERRUPTED, enter(context), "interrupted flag");
    EXPECT_GE(steady_clock::now() - start, std::chrono::milliseconds(50));
    EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10));
    EXPECT_EQ(last_error().context_failed, 1);
    __atomic_store_n(&flag, 0, __ATOMIC_RELEASE);
    EXPECT_FAILS(FSDP_INTERRUPTED, knock(context), "interrupted flag");  // it stays so
  });
}

TEST(MisusedThreads, ATimeoutNamesTheRankThatDidNotCome) {
  Scenario setup = small_setup_of(2);
  setup.context.timeout_ms = 100;
  fsdp_context *contexts[2] = {};
  FSDP(fsdp_create_local_contexts(2, &setup.context, contexts));
  const auto start = steady_clock::now();
  EXPECT_FAILS(FSDP_TIMEOUT, enter(contexts[0]), "rank 1", "100 ms");
  EXPECT_EQ(last_error().rank, 1);
  EXPECT_EQ(last_error().context_failed, 1);
  EXPECT_GE(steady_clock::now() - start, std::chrono::milliseconds(100)) << "it gave up early";
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_FAILS(FSDP_TIMEOUT, knock(contexts[0]), "rank 1");
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
}

TEST(MisusedThreads, WorkAfterTheCloseEnds) {
  Scenario setup = small_setup_of(2);
  setup.context.timeout_ms = 20000;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    auto rank = std::make_unique<Rank>(context, setup);
    rank->load();
    FSDP(fsdp_close_context(context));
    const auto start = steady_clock::now();
    if (r == 0) {
      EXPECT_FAILS(FSDP_INVALID_STATE, enter(context), "fsdp_all_reduce_values", "closed", "destroy");
      EXPECT_FAILS(FSDP_PEER_FAILED, fsdp_begin_update(rank->model, nullptr), "rank 1", "closed its context");
      EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10)) << "waited for a rank that has left";
    }
  });
}

// What each of the child's calls returned, as its exit status: the number of the first wrong one, 0 if all are right.
int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(MisusedFork, EveryCallInTheChildIsInvalidState) {
  Solo solo(State::published);
  fsdp_model *model = nullptr;
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  const std::pair<const char *, std::function<fsdp_status()>> calls[] = {
      {"fsdp_all_reduce_values", [&] { return enter(solo.context); }},
      {"fsdp_create_model", [&] { return fsdp_create_model(solo.context, nullptr, &model); }},
      {"fsdp_unshard", [&] { return fsdp_unshard(solo.group(0), FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_acquire_grad", [&] { return fsdp_acquire_grad(solo.group(0), 0, 0, nullptr, &tensor, &accumulate); }},
      {"fsdp_finish_grads", [&] { return fsdp_finish_grads(solo.model, 1, 0, nullptr); }},
      {"fsdp_discard_step", [&] { return fsdp_discard_step(solo.model, nullptr); }},
      {"fsdp_close_context", [&] { return fsdp_close_context(solo.context); }},
      {"fsdp_abort_context", [&] { return fsdp_abort_context(solo.context, "from the child"); }}};
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);
    int number = 0;
    for (const auto &[name, call] : calls) {
      ++number;
      const testing::AssertionResult refused = fails(call(), FSDP_INVALID_STATE, {"fork", "rank 0"});
      if (refused) continue;
      std::fprintf(stderr, "%s: %s\n", name, refused.message());
      ::_exit(number);
    }
    ::_exit(0);
  }
  EXPECT_EQ(wait_for(child), 0);
  solo.clean_step();
}

// Destructors that run in a child end, and do no harm to the parent, nor to its peers.
TEST(MisusedFork, DestroyInTheChildLeavesTheParentAlone) {
  Solo solo(State::published);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);
    fsdp_destroy_model(solo.model);
    fsdp_destroy_context(solo.context);
    ::_exit(0);
  }
  EXPECT_EQ(wait_for(child), 0);
  solo.clean_step();
  EXPECT_WORKS(enter(solo.context));
}

}  // namespace
