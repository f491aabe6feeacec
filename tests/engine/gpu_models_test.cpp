// SPDX-License-Identifier: Apache-2.0
// Two models of a context on simulated GPUs: ranks that share both must interleave their calls alike. A second test in
// meson.build runs them with the simulated NCCL, where a different order waits for ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>

#include "device.h"
#include "graph.h"

using namespace harness;

namespace {

constexpr double reported_soon = 2;  // far below the timeout of a minute

std::vector<GroupDef> groups_of(const std::string &name) {
  std::vector<GroupDef> groups;
  for (const char *number : {".0", ".1"}) groups.push_back({name + number, {{name + number + ".w", {24, 8}}}});
  return groups;
}

Scenario model_scenario(const std::string &name, uint32_t ranks,
                        fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS) {
  Scenario setup = has_nccl() ? nccl_scenario(strategy, ranks) : graph_scenario(strategy, ranks);
  setup.groups = groups_of(name);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.context.timeout_ms = 60'000;
  return setup;
}

// Experts of two of four ranks.
struct Experts {
  explicit Experts(uint32_t rank) : members{rank % 2, rank % 2 + 2}, setup(model_scenario("expert", 4)) {
    setup.mesh.ranks = members;
    setup.mesh.rank_count = 2;
    setup.mesh.shard_size = 2;
  }
  uint32_t members[2];
  Scenario setup;
};

void gather(Rank &rank, size_t g) {
  FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, stream()));
  FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, stream()));
}

// The caller waits for nothing, because work of a mistaken order does not end.
void reduce(Rank &rank, size_t g) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[g], 0, 0, stream(), &grad, &accumulate));
  CUDA(simulated::enqueue(
      static_cast<cudaStream_t>(stream()),
      [to = static_cast<float *>(grad.data), count = grad.element_count] { std::fill(to, to + count, 1.0F); }));
  FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
}

// Calls in this order, or in the opposite one.
using OrderedCall = std::function<void()>;
void call_in_order(bool usual, const OrderedCall &one, const OrderedCall &other) {
  (usual ? one : other)();
  (usual ? other : one)();
}

void await_all(fsdp_context *context) {
  double one = 1;
  FSDP(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM));
}

void publish(Rank &rank) {
  FSDP(fsdp_begin_update(rank.model, stream()));
  FSDP(fsdp_publish_weights(rank.model, stream()));
}

// Both models, after a step of each, in which NCCL has connected the ranks.
using TwoBody = std::function<void(Rank &, Rank &)>;
void run_two(uint32_t ranks, const TwoBody &body) {
  const Scenario dense_setup = model_scenario("dense", ranks), expert_setup = model_scenario("expert", ranks);
  run_threads(dense_setup, [&](uint32_t, fsdp_context *context) {
    Rank dense(context, dense_setup), expert(context, expert_setup);
    for (Rank *rank : {&dense, &expert}) {
      rank->load();
      clean_step(*rank, 0);
    }
    await_all(context);
    body(dense, expert);
    FSDP(fsdp_close_context(context));
  });
}

void expect_reported(const std::function<fsdp_status()> &call, const std::vector<std::string> &words) {
  const double start = now();
  require_error(call(), FSDP_MISMATCH, words);
  REQUIRE(now() - start < reported_soon);
}

// Both models have the weights of one process after two steps.
void require_trained(const Rank &rank) {
  Scenario setup = rank.setup;
  setup.steps = 2;
  REQUIRE(same_bits(rank.read_all(), reference(setup).weights));
}

void expect_other_order_is_reported(const std::function<void(Rank &, size_t)> &call, const char *verb) {
  const std::string did(verb);
  run_two(2, [&](Rank &dense, Rank &expert) {
    call(dense, 1);
    call(expert, 1);
    call_in_order(
        dense.rank == 0, [&] { call(dense, 0); }, [&] { call(expert, 0); });
    expect_reported(
        [&] { return fsdp_finish_grads(dense.model, 1, 0, stream()); },
        {"two models are called in different orders: rank 0 " + did + " group 'dense.0' of model 0 before it " + did +
             " group 'expert.0' of model 1, rank 1 the other way round",
         "fsdp_discard_step"});
    FSDP(fsdp_discard_step(dense.model, stream()));
    clean_step(dense, 1);
    // The other model's calls are in the same order everywhere. They are not compared with those of the discarded step.
    if (did == "reduced")
      FSDP(fsdp_finish_grads(expert.model, 1, 0, stream()));
    else
      FSDP(fsdp_begin_update(expert.model, stream()));
    FSDP(fsdp_publish_weights(expert.model, stream()));
    clean_step(expert, 1);
    require_trained(dense);
    require_trained(expert);
    // From then on both are compared again.
    call_in_order(
        dense.rank == 0, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    expect_reported([&] { return fsdp_begin_update(expert.model, stream()); }, {"two models"});
    FSDP(fsdp_discard_step(expert.model, stream()));
    publish(dense);
  });
}

TEST(GpuModels, GathersInOtherOrdersAreReported) { expect_other_order_is_reported(gather, "gathered"); }
TEST(GpuModels, ReducesInOtherOrdersAreReported) { expect_other_order_is_reported(reduce, "reduced"); }

// The model that is called second on the first rank meets first, and names the same two calls.
TEST(GpuModels, FirstModelToMeetReportsTheDifference) {
  run_two(2, [&](Rank &dense, Rank &expert) {
    call_in_order(
        dense.rank == 0, [&] { gather(dense, 0); }, [&] { gather(expert, 1); });
    for (Rank *rank : {&expert, &dense})
      expect_reported([&] { return fsdp_begin_update(rank->model, stream()); },
                      {"group 'dense.0' of model 0", "group 'expert.1' of model 1", "rank 0", "rank 1"});
    for (Rank *rank : {&dense, &expert}) FSDP(fsdp_discard_step(rank->model, stream()));
    for (Rank *rank : {&expert, &dense}) clean_step(*rank, 1);
    require_trained(dense);
    require_trained(expert);
  });
}

// Work that waits in a circle is aborted, although each model's own calls are the same on all ranks.
TEST(GpuModels, DiscardWithoutMeetingEndsWaitingWork) {
  run_two(2, [&](Rank &dense, Rank &expert) {
    const double start = now();
    call_in_order(
        dense.rank == 0, [&] { gather(dense, 0); }, [&] { gather(expert, 1); });
    FSDP(fsdp_discard_step(dense.model, stream()));
    FSDP(fsdp_discard_step(expert.model, stream()));
    clean_step(dense, 1);
    clean_step(expert, 1);
    REQUIRE(now() - start < 20);
    require_trained(dense);
    require_trained(expert);
  });
}

// A call of one model may come before or after the other model's meeting, because nothing is enqueued there.
TEST(GpuModels, MeetingsMayLieBetweenCallsOfTheOtherModel) {
  for (const uint32_t ranks : {2u, 4u})
    run_two(ranks, [&](Rank &dense, Rank &expert) {
      std::mt19937 random(7);
      for (uint32_t step = 1; step <= 50; ++step) {
        std::vector<OrderedCall> calls;
        for (Rank *rank : {&dense, &expert})
          for (size_t g = 0; g < 2; ++g) {
            calls.emplace_back([=] { gather(*rank, g); });
            calls.emplace_back([=] { reduce(*rank, g); });
          }
        std::ranges::shuffle(calls, random);
        for (const OrderedCall &call : calls) call();
        call_in_order((dense.rank + step) % 2, [&] { gather(expert, 0); },
                      [&] { FSDP(fsdp_finish_grads(dense.model, 1, 0, stream())); });
        FSDP(fsdp_finish_grads(expert.model, 1, 0, stream()));
        for (Rank *rank : {&dense, &expert}) update(*rank);
      }
    });
}

// Ranks 0 and 2 share experts, and so do ranks 1 and 3: each two have an order of their own.
TEST(GpuModels, RanksThatShareOneModelNeedNoCommonOrder) {
  const Scenario dense_setup = model_scenario("dense", 4);
  run_threads(dense_setup, [&](uint32_t r, fsdp_context *context) {
    const Experts experts(r);
    Rank dense(context, dense_setup), expert(context, experts.setup);
    for (Rank *rank : {&dense, &expert}) rank->load();
    for (uint32_t step = 0; step < 2; ++step) {
      call_in_order(
          r % 2, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
      gather(dense, 1);
      for (Rank *rank : {&dense, &expert}) publish(*rank);
    }
    call_in_order(
        r != 3, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    gather(dense, 1);
    // Only two ranks differ, and all four that meet are told.
    expect_reported(
        [&] { return fsdp_begin_update(dense.model, stream()); },
        {"rank 1 gathered group 'dense.0' of model 0 before it gathered group 'expert.0' of model 0 on ranks "
         "1, 3, rank 3 the other way round"});
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(expert);
    clean_step(dense, 0);
    FSDP(fsdp_close_context(context));
  });
}

// A gather of one replica waits for no other replica.
TEST(GpuModels, ReplicasNeedNoCommonOrderOfGathers) {
  Scenario dense_setup = model_scenario("dense", 4), expert_setup = model_scenario("expert", 4);
  for (Scenario *setup : {&dense_setup, &expert_setup}) setup->mesh.replicate_size = setup->mesh.shard_size = 2;
  run_threads(dense_setup, [&](uint32_t r, fsdp_context *context) {
    Rank dense(context, dense_setup), expert(context, expert_setup);
    for (Rank *rank : {&dense, &expert}) rank->load();
    call_in_order(
        r < 2, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    gather(dense, 1);
    for (Rank *rank : {&dense, &expert}) publish(*rank);
    call_in_order(
        r < 3, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    expect_reported(
        [&] { return fsdp_begin_update(dense.model, stream()); },
        {"rank 2 gathered group 'dense.0' of model 0 before it gathered group 'expert.0' of model 1, rank 3 "
         "the other way round"});
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(expert);
    clean_step(dense, 0);
    FSDP(fsdp_close_context(context));
  });
}

// Experts of ranks that are in different shard axes of the dense model.
TEST(GpuModels, AxesThatShareOneRankNeedNoCommonOrder) {
  Scenario dense_setup = model_scenario("dense", 4);
  dense_setup.mesh.replicate_size = dense_setup.mesh.shard_size = 2;
  run_threads(dense_setup, [&](uint32_t r, fsdp_context *context) {
    const Experts experts(r);
    Rank dense(context, dense_setup), expert(context, experts.setup);
    for (Rank *rank : {&dense, &expert}) rank->load();
    call_in_order(
        r < 2, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    gather(expert, 1);
    for (Rank *rank : {&expert, &dense}) publish(*rank);
    FSDP(fsdp_close_context(context));
  });
}

// The experts meet first: only their ranks are told.
TEST(GpuModels, RanksOutsideTheModelGetNoError) {
  const Scenario dense_setup = model_scenario("dense", 4);
  run_threads(dense_setup, [&](uint32_t r, fsdp_context *context) {
    const Experts experts(r);
    Rank dense(context, dense_setup), expert(context, experts.setup);
    for (Rank *rank : {&dense, &expert}) rank->load();
    await_all(context);
    call_in_order(
        r != 2, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    if (r % 2) {
      publish(expert);
    } else {
      expect_reported(
          [&] { return fsdp_begin_update(expert.model, stream()); },
          {"rank 2 gathered group 'expert.0' of model 0 on ranks 0, 2 before it gathered group 'dense.0' of model 0, "
           "rank 0 the other way round"});
      FSDP(fsdp_discard_step(expert.model, stream()));
    }
    publish(dense);
    clean_step(expert, 0);
    FSDP(fsdp_close_context(context));
  });
}

// One rank may destroy a model before the other model's meeting, and one after it. A later model has a name of its own.
TEST(GpuModels, AModelThatEndsIsNotCompared) {
  const Scenario dense_setup = model_scenario("dense", 2), expert_setup = model_scenario("expert", 2);
  run_threads(dense_setup, [&](uint32_t r, fsdp_context *context) {
    Rank dense(context, dense_setup);
    dense.load();
    std::optional<Rank> expert;
    for (uint32_t turn = 0; turn < 3; ++turn) {
      expert.emplace(context, expert_setup);
      expert->load();
      gather(*expert, 0);
      gather(dense, 0);
      publish(*expert);
      call_in_order(
          r == 0, [&] { expert.reset(); }, [&] { publish(dense); });
    }
    expert.emplace(context, expert_setup);
    expert->load();
    call_in_order(
        r == 0, [&] { gather(dense, 0); }, [&] { gather(*expert, 0); });
    expect_reported([&] { return fsdp_begin_update(dense.model, stream()); },
                    {"rank 0 gathered group 'dense.0' of model 0 before it gathered group 'expert.0' of model 4"});
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(*expert);
    FSDP(fsdp_close_context(context));
  });
}

// Models of the same ranks are told apart by numbers. Each model's work waits behind that of the two others, so
// discarding the step of one model frees nothing.
TEST(GpuModels, ThreeModelsAreToldApart) {
  const Scenario setups[] = {model_scenario("dense", 2), model_scenario("expert", 2), model_scenario("third", 2)};
  run_threads(setups[0], [&](uint32_t r, fsdp_context *context) {
    Rank dense(context, setups[0]), expert(context, setups[1]), third(context, setups[2]);
    for (Rank *rank : {&dense, &expert, &third}) {
      rank->load();
      clean_step(*rank, 0);
    }
    gather(r == 0 ? expert : third, 0);
    gather(dense, 0);
    gather(r == 0 ? third : expert, 0);
    expect_reported([&] { return fsdp_begin_update(dense.model, stream()); },
                    {"rank 1 gathered group 'dense.0' of model 0 before it gathered group 'expert.0' of model 1"});
    expect_reported([&] { return fsdp_begin_update(third.model, stream()); },
                    {"rank 1 gathered group 'third.0' of model 2 before it gathered group 'dense.0' of model 0"});
    await_all(context);
    fsdp_abort_context(context, "the test ends");
  });
}

// If the model's own calls differ, or a rank discards, the order among models is not reported.
TEST(GpuModels, OrderAmongModelsIsNotReportedIfOwnCallsDiffer) {
  run_two(2, [&](Rank &dense, Rank &expert) {
    call_in_order(
        dense.rank == 0, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    if (dense.rank == 1) gather(dense, 1);
    expect_reported([&] { return fsdp_begin_update(dense.model, stream()); }, {"as number 2, rank 0 nothing more"});
    REQUIRE(last_message().find("two models") == std::string::npos);
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(expert);
    call_in_order(
        dense.rank == 0, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    if (dense.rank == 0)
      require_error(fsdp_begin_update(dense.model, stream()), FSDP_INVALID_STATE,
                    {"rank 0 called fsdp_begin_update, rank 1 called fsdp_discard_step"});
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(expert);
    for (Rank *rank : {&dense, &expert}) clean_step(*rank, 1);
  });
}

// What is no longer kept is left out of the message.
TEST(GpuModels, ErrorNamesNoCallsThatAreNotKept) {
  if (has_nccl()) GTEST_SKIP() << "so many calls do not fit behind one that waits";
  constexpr uint32_t kept = 8192;
  run_two(2, [&](Rank &dense, Rank &expert) {
    call_in_order(
        dense.rank == 0, [&] { gather(dense, 0); }, [&] { gather(expert, 0); });
    for (uint32_t i = 0; i < kept; ++i) gather(dense, 1);
    require_error(
        fsdp_begin_update(dense.model, stream()), FSDP_MISMATCH,
        {"ranks 0 and 1 have called this model and another one in different orders, more than 8192 calls ago"});
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(expert);
  });
}

// The collectives that a publish enqueues for whole weights, or for scales, are compared like all others. They belong
// to a step that has ended and cannot be discarded.
void expect_publish_is_compared(const Scenario &dense_setup, const std::string &did) {
  const Scenario expert_setup = model_scenario("expert", 2);
  run_threads(dense_setup, [&](uint32_t r, fsdp_context *context) {
    Rank dense(context, dense_setup), expert(context, expert_setup);
    for (Rank *rank : {&dense, &expert}) {
      rank->load();
      clean_step(*rank, 0);
    }
    FSDP(fsdp_begin_update(dense.model, stream()));
    call_in_order(
        r == 0, [&] { FSDP(fsdp_publish_weights(dense.model, stream())); }, [&] { gather(expert, 0); });
    expect_reported([&] { return fsdp_begin_update(dense.model, stream()); },
                    {"rank 0 " + did + " of model 0 before it gathered group 'expert.0' of model 1"});
    await_all(context);
    fsdp_abort_context(context, "the test ends");
  });
}

TEST(GpuModels, RefreshesOfWholeWeightsAreCompared) {
  expect_publish_is_compared(model_scenario("dense", 2, FSDP_STRATEGY_OPTIM),
                             "refreshed the whole weights of group 'dense.0'");
}

TEST(GpuModels, ExchangesOfScalesAreCompared) {
  Scenario setup = model_scenario("dense", 2);
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_FP8;
  expect_publish_is_compared(setup, "exchanged numbers of its parameters");
}

// A replay is one call, whatever the graph has.
TEST(GpuModels, ReplaysInOtherOrdersAreReported) {
  NEEDS_NCCL();
  run_two(2, [&](Rank &dense, Rank &expert) {
    const Stream captured;
    std::optional<Graph> graph(std::in_place, dense, captured, [&] {
      FSDP(fsdp_unshard(dense.groups[0], FSDP_EVAL, 0, captured));
      FSDP(fsdp_reshard(dense.groups[0], FSDP_EVAL, 0, captured));
    });
    call_in_order(
        dense.rank == 0, [&] { graph->replay(0); }, [&] { gather(expert, 0); });
    expect_reported([&] { return fsdp_begin_update(dense.model, stream()); },
                    {"rank 0 replayed capture 1 of model 0 before it gathered group 'expert.0' of model 1"});
    graph.reset();
    FSDP(fsdp_discard_step(dense.model, stream()));
    publish(expert);
  });
}

// Captured calls enqueue nothing: ranks that have captured different ones go on.
TEST(GpuModels, CallsOfACaptureAreNotCompared) {
  NEEDS_NCCL();
  run_two(2, [&](Rank &dense, Rank &expert) {
    const Stream captured;
    gather(expert, 0);
    begin_capture(dense, captured);
    for (uint32_t i = 0; i <= dense.rank; ++i) {
      FSDP(fsdp_unshard(dense.groups[0], FSDP_EVAL, 0, captured));
      FSDP(fsdp_reshard(dense.groups[0], FSDP_EVAL, 0, captured));
    }
    fsdp_capture *capture = nullptr;
    require_error(fsdp_end_capture(dense.model, captured, &capture), FSDP_MISMATCH,
                  {"rank 0 nothing more", "end the capture"});
    end_cuda_capture(captured);
    gather(dense, 1);
    gather(expert, 1);
    for (Rank *rank : {&dense, &expert}) publish(*rank);
  });
}

}  // namespace
