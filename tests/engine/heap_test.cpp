// SPDX-License-Identifier: Apache-2.0
// A program of its own, since its heap ends where a test says.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <new>

#include "harness.h"

namespace {
std::atomic<int64_t> left{-1};  // allocations before one fails; below 0: none does
thread_local int64_t made = 0;  // by this thread
}  // namespace

void *operator new(size_t bytes) {
  ++made;
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void *data = std::malloc(bytes ? bytes : 1)) return data;
  throw std::bad_alloc();
}
// A sanitizer replaces each allocator function that the program does not define, and the two must not be mixed.
void *operator new(size_t bytes, const std::nothrow_t &) noexcept { return std::malloc(bytes ? bytes : 1); }
void operator delete(void *data, const std::nothrow_t &) noexcept { std::free(data); }
void operator delete(void *data) noexcept { std::free(data); }
void operator delete(void *data, size_t) noexcept { std::free(data); }

using namespace harness;

namespace {

// A failed change has no effect: the model trains as before.
TEST(Heap, AnLrScaleThatCannotBeSetStaysAsItWas) {
  for (int64_t allocations = 0, failures = 1; failures; ++allocations) {
    failures = 0;
    const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 1);
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const std::vector<float> before = rank.read(0, 0);
      left = allocations;
      const fsdp_status status = fsdp_set_param_lr_scale(rank.groups[0], 0, 3.0);
      failures = left < 0;
      left = -1;
      REQUIRE(status == (failures ? FSDP_OUT_OF_MEMORY : FSDP_OK));
      fsdp_param info = FSDP_PARAM_INIT;
      FSDP(fsdp_get_param_info(rank.groups[0], 0, &info));
      REQUIRE(info.lr_scale == (failures ? 1 : 3));
      reduce_all(rank, 1);
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
      const std::vector<float> after = rank.read(0, 0);
      for (size_t i = 0; i < before.size(); ++i)
        REQUIRE(std::abs(before[i] - after[i] - (failures ? 0.01f : 0.03f)) < 1e-5f);
      FSDP(fsdp_close_context(context));
    });
    ASSERT_LT(allocations, 100);
  }
}

// A caller that does not wait may repeat the call: each call allocates one message and nothing else.
TEST(Heap, ABusyGradientTakesLittle) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  std::atomic<bool> asked{false};
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    const auto give = [&](size_t g) {
      put_all(rank, g, 1);
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
    };
    for (const double begin = now(); r == 1 && !asked; pause_ms(1)) REQUIRE(now() - begin < 60);
    for (const size_t g : {3u, 2u}) give(g);
    constexpr int times = 1000;
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    const auto ask = [&] {
      return fsdp_acquire_grad(rank.groups[1], 0, FSDP_GRAD_NO_WAIT, nullptr, &grad, &accumulate);
    };
    if (r == 0) REQUIRE(ask() == FSDP_BUSY);
    const int64_t before = made;
    const double begin = now();
    for (int i = 0; r == 0 && i < times; ++i) REQUIRE(ask() == FSDP_BUSY);
    REQUIRE(made - before <= 10 * times);
    REQUIRE(is_sanitized() || now() - begin < times * 1e-3);
    asked = true;
    for (const size_t g : {1u, 0u}) give(g);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// fsdp_set_param_trainable allocates nothing, so it cannot run out of memory.
TEST(Heap, WhatIsTrainedChangesWithoutAny) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (const int32_t trainable : {0, 1}) {
      left = 0;
      const fsdp_status status = fsdp_set_param_trainable(rank.groups[0], 0, trainable);
      left = -1;
      FSDP(status);
    }
    FSDP(fsdp_close_context(context));
  });
}

// A step that skips parameters uses lists and exchange memory from the seal, whether ranks gave the same gradients or
// not.
TEST(Heap, AStepSkipsMissingGradientsWithoutAny) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  for (GroupDef &group : scenario.groups)
    for (ParamDef &param : group.params) param.missing_grad = FSDP_MISSING_GRAD_SKIP;
  std::barrier all(2);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (const uint32_t givers : {2u, 1u, 0u}) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        if (r < givers) put_all(rank, g, 1);
        for (size_t p = 0; r >= givers && p < rank.def(g).params.size(); ++p)
          FSDP(fsdp_put_grad(rank.groups[g], p, nullptr, 0, 0, 0, nullptr));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      all.arrive_and_wait();
      if (r == 0) left = 0;
      all.arrive_and_wait();
      const fsdp_status status = fsdp_finish_grads(rank.model, 1.0, 0, nullptr);
      const fsdp_status stepped = fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr);
      all.arrive_and_wait();
      if (r == 0) left = -1;
      all.arrive_and_wait();
      FSDP(status);
      FSDP(stepped);
    }
    FSDP(fsdp_close_context(context));
  });
}

// After the first pass over chunks of shards, a pass uses the lists and buffers of the first.
TEST(Heap, APassOverChunksAllocatesNothing) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  scenario.groups = {{"all", {{"a parameter with a long name", {40'000}, FSDP_BFLOAT16}}}};
  scenario.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  scenario.model.optimizer = FSDP_OPTIMIZER_CALLER;
  scenario.model.state_home = scenario.model.main_home = FSDP_HOME_FILE;
  scenario.model.home_directory = "/var/tmp";
  scenario.model.turn_bytes = 65536;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_begin_update(rank.model, nullptr));
    for (const bool first : {true, false}) {
      fsdp_shard chunk = FSDP_SHARD_INIT;
      fsdp_tensor state = FSDP_TENSOR_INIT;
      uint64_t chunks = 0;
      fsdp_status status = FSDP_OK;
      left = first ? -1 : 0;
      while ((status = fsdp_next_shard_chunk(rank.model, nullptr, &chunk)) == FSDP_OK && chunk.element_count) {
        status = fsdp_get_shard_chunk_state(rank.model, "momentum", &state);
        if (status != FSDP_OK) break;
        ++chunks;
      }
      left = -1;
      FSDP(status);
      REQUIRE(chunks == 5);
    }
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
