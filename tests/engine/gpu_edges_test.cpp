// SPDX-License-Identifier: Apache-2.0
// Over simulated GPUs, each test checks one edge of the order: what must come after a late stream. A whole program
// (gpu_order_test.cpp) would not show a missing edge, because other edges or its own calls order the work too.
// docs/contracts/streams-and-threads.md lists the edges.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "device.h"
#include "gpu_order.h"
#include "held_up.h"

using namespace order;

namespace {

constexpr int late_ms = 60;

// Every rank of two with loaded weights, one stream that will be late and one that will not.
using Body = std::function<void(Rank &, cudaStream_t late, cudaStream_t other)>;
void on_two_ranks(fsdp_strategy strategy, const Body &body) {
  const Scenario setup = order_scenario(Layout::flat, strategy);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    stream();
    Rank rank(context, setup);
    rank.load();
    const Stream late, other;
    body(rank, late, other);
    for (const Stream *stream : {&late, &other}) CUDA(cudaStreamSynchronize(*stream));
    FSDP(fsdp_close_context(context));
  });
}

bool is_nan(uint16_t bf16) { return (bf16 & 0x7f80) == 0x7f80 && (bf16 & 0x7f) != 0; }

void finish(Rank &rank, cudaStream_t stream, float value = 2) {
  reduce_all(rank, value);
  FSDP(fsdp_finish_grads(rank.model, 1, 0, stream));
}

// Enqueues a step whose update takes a while, and returns before it is done.
void step_late(Rank &rank, cudaStream_t late) {
  finish(rank, late);
  nap(late, late_ms);
  FSDP(fsdp_step_adamw(rank.model, 0.125, nullptr, late));
}

TEST(GpuEdges, ParametersAreReadAfterTheUpdate) {
  for (const fsdp_strategy strategy : strategies)
    on_two_ranks(strategy, [](Rank &rank, cudaStream_t late, cudaStream_t) {
      const auto before = rank.read_all();
      step_late(rank, late);
      const auto after = rank.read_all();
      CUDA(cudaStreamSynchronize(late));
      REQUIRE(same_bits(after, rank.read_all()) && !same_bits(after, before));
    });
}

TEST(GpuEdges, ParametersAreLoadedAfterTheUpdate) {
  for (const fsdp_strategy strategy : strategies)
    for (const bool chunks : {false, true})
      on_two_ranks(strategy, [chunks](Rank &rank, cudaStream_t late, cudaStream_t) {
        step_late(rank, late);
        FSDP(fsdp_begin_update(rank.model, late));
        const std::vector<float> fives(24 * 8, 5.0f);
        if (chunks) {
          for (const fsdp_shard &shard : rank.shards())
            FSDP(fsdp_load_chunk(shard.group, shard.param_index, fives.data(), FSDP_FLOAT32, shard.row_offset,
                                 shard.row_count, 0));
        } else {
          for (size_t g = 0; g < rank.groups.size(); ++g)
            for (size_t p = 0; p < rank.def(g).params.size(); ++p)
              FSDP(fsdp_load_param(rank.groups[g], p, fives.data(), FSDP_FLOAT32, rank.def(g).params[p].count(),
                                   FSDP_EVERY_RANK, 0));
        }
        FSDP(fsdp_publish_weights(rank.model, late));
        for (const auto &weights : rank.read_all())
          for (const float weight : weights) REQUIRE(weight == 5.0f);
      });
}

// A checkpoint has the weights that the late update writes: a load gives the same weights.
TEST(GpuEdges, ACheckpointIsOfWhatTheUpdateWrites) {
  for (const fsdp_strategy strategy : strategies) {
    std::string path = "/var/tmp/gpu-edges-XXXXXX";
    ASSERT_NE(::mkdtemp(path.data()), nullptr);
    on_two_ranks(strategy, [&](Rank &rank, cudaStream_t late, cudaStream_t) {
      const auto before = rank.read_all();
      step_late(rank, late);
      fsdp_checkpoint *checkpoint = nullptr;
      FSDP(fsdp_begin_checkpoint(rank.context, path.c_str(), nullptr, &checkpoint));
      FSDP(fsdp_add_checkpoint_model(checkpoint, nullptr, rank.model));
      FSDP(fsdp_commit_checkpoint(checkpoint));
      FSDP(fsdp_wait_checkpoint(checkpoint));
      fsdp_destroy_checkpoint(checkpoint);
      const auto after = rank.read_all();
      FSDP(fsdp_begin_update(rank.model, late));
      FSDP(fsdp_load(rank.model, path.c_str(), nullptr, nullptr));
      FSDP(fsdp_publish_weights(rank.model, late));
      REQUIRE(same_bits(after, rank.read_all()) && !same_bits(after, before));
    });
    std::filesystem::remove_all(path);
  }
}

// The norm is asked for on another stream and on the same one; the host waits for the scaling in both cases.
TEST(GpuEdges, NormsAreThoseAfterAScaling) {
  for (const fsdp_strategy strategy : strategies)
    for (const bool same : {false, true})
      on_two_ranks(strategy, [same](Rank &rank, cudaStream_t late, cudaStream_t other) {
        finish(rank, late);
        double before = 0, after = 0;
        FSDP(fsdp_get_grad_norm(rank.model, nullptr, late, &before));
        nap(late, late_ms);
        FSDP(fsdp_scale_grads(rank.model, 4, late));
        FSDP(fsdp_get_grad_norm(rank.model, nullptr, same ? late : other, &after));
        REQUIRE(before > 0 && after == 4 * before);
        FSDP(fsdp_discard_step(rank.model, other));
      });
}

TEST(GpuEdges, WhatIsNotFiniteAfterAScalingIsFound) {
  on_two_ranks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, [](Rank &rank, cudaStream_t late, cudaStream_t other) {
    finish(rank, late);
    int32_t found = -1;
    FSDP(fsdp_check_grads(rank.model, other, &found, nullptr));
    REQUIRE(found == 0);
    nap(late, late_ms);
    FSDP(fsdp_scale_grads(rank.model, 3e38, late));
    FSDP(fsdp_check_grads(rank.model, other, &found, nullptr));
    REQUIRE(found == 1);
    FSDP(fsdp_discard_step(rank.model, other));
  });
}

TEST(GpuEdges, ZerosAfterAScalingAreCounted) {
  on_two_ranks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, [](Rank &rank, cudaStream_t late, cudaStream_t other) {
    uint64_t before = 0, after = 0, all = 0;
    for (const GroupDef &group : rank.setup.groups)
      for (const ParamDef &param : group.params) all += param.count();
    finish(rank, late);
    FSDP(fsdp_count_zero_grads(rank.model, other, &before));
    nap(late, late_ms);
    FSDP(fsdp_scale_grads(rank.model, 0, late));
    FSDP(fsdp_count_zero_grads(rank.model, other, &after));
    REQUIRE(before < all && after == all);
    FSDP(fsdp_discard_step(rank.model, other));
  });
}

TEST(GpuEdges, WeightNormsAreThoseAfterTheUpdate) {
  on_two_ranks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, [](Rank &rank, cudaStream_t late, cudaStream_t other) {
    size_t count = 0;
    for (const GroupDef &group : rank.setup.groups) count += group.params.size();
    std::vector<double> before(count), at_once(count), after(count);
    FSDP(fsdp_get_param_weight_norms(rank.model, other, before.data(), count));
    finish(rank, late);
    nap(late, late_ms);
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, late));
    FSDP(fsdp_get_param_weight_norms(rank.model, other, at_once.data(), count));
    CUDA(cudaStreamSynchronize(late));
    FSDP(fsdp_get_param_weight_norms(rank.model, late, after.data(), count));
    REQUIRE(at_once == after && before != after);
  });
}

TEST(GpuEdges, ViewsSayThatTheyAreOfAGpu) {
  on_two_ranks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, [](Rank &rank, cudaStream_t late, cudaStream_t) {
    fsdp_tensor view = FSDP_TENSOR_INIT, grad = FSDP_TENSOR_INIT;
    const int32_t gpu = has_gpu_for_each(2) ? static_cast<int32_t>(rank.rank) : 0;
    int32_t accumulate = 0;
    FSDP(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, late));
    FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_BACKWARD, &view));
    FSDP(fsdp_acquire_grad(rank.groups[0], 0, 0, late, &grad, &accumulate));
    for (const fsdp_tensor &tensor : {view, grad})
      REQUIRE(tensor.device == FSDP_DEVICE_CUDA && tensor.device_index == gpu);
    REQUIRE((view.flags & FSDP_TENSOR_READ_ONLY) && !(grad.flags & FSDP_TENSOR_READ_ONLY));
    FSDP(fsdp_discard_step(rank.model, late));
  });
}

// The poison comes in the order of the stream that reshard is given: readers before it see the weights, later ones NaN.
TEST(GpuEdges, ReleasedViewsArePoisonedInDebugMode) {
  const Scenario setup = order_scenario(Layout::debug, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    stream();
    Rank rank(context, setup);
    rank.load();
    const Stream late;
    for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD})
      for (size_t turn = 0; turn < rank.groups.size(); ++turn) {
        const size_t g = phase == FSDP_FORWARD ? turn : rank.groups.size() - 1 - turn;
        FSDP(fsdp_unshard(rank.groups[g], phase, 0, late));
        fsdp_tensor view = FSDP_TENSOR_INIT;
        FSDP(fsdp_get_param(rank.groups[g], 0, phase, &view));
        const auto *const values = static_cast<const uint16_t *>(view.data);  // bf16
        uint64_t before = 0;
        nap(late, 20);
        CUDA(simulated::enqueue(late, [&] { before = std::count_if(values, values + view.element_count, is_nan); }));
        FSDP(fsdp_reshard(rank.groups[g], phase, 0, late));
        CUDA(cudaStreamSynchronize(late));
        const auto all_are_nan = [&] { return std::all_of(values, values + view.element_count, is_nan); };
        for (const double begin = now(); now() - begin < 10 && !all_are_nan();) pause_ms(1);
        REQUIRE(before == 0);
        REQUIRE(all_are_nan());
      }
    FSDP(fsdp_discard_step(rank.model, late));
    CUDA(cudaStreamSynchronize(late));
    FSDP(fsdp_close_context(context));
  });
}

// Only one of the two is late.
TEST(GpuEdges, ReplicasAreComparedAfterTheUpdate) {
  on_two_ranks(FSDP_STRATEGY_NO_SHARD, [](Rank &rank, cudaStream_t late, cudaStream_t other) {
    finish(rank, late);
    if (rank.rank == 1) nap(late, late_ms);
    FSDP(fsdp_step_adamw(rank.model, 0.125, nullptr, late));
    FSDP(fsdp_check_replicas(rank.model, 0, other));
  });
}

void add_on(Rank &rank, size_t param, float value, cudaStream_t stream) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[0], param, 0, stream, &grad, &accumulate));
  CUDA(simulated::enqueue(stream, [=, to = static_cast<float *>(grad.data), count = grad.element_count] {
    for (uint64_t i = 0; i < count; ++i) to[i] = (accumulate ? to[i] : 0.0f) + value;
  }));
}

// Contributions are added up in one buffer: the second one is written on a stream that has not written this parameter
// before.
TEST(GpuEdges, AContributionIsAddedAfterTheOneBefore) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM})
    on_two_ranks(strategy, [](Rank &rank, cudaStream_t late, cudaStream_t other) {
      for (const bool last : {false, true}) {
        for (size_t g = rank.groups.size(); g-- > 1;) {
          put_all(rank, g, 1);
          FSDP(fsdp_reduce_grad(rank.groups[g], last ? FSDP_LAST : 0, stream()));
        }
        add_on(rank, 0, 1, other);
        if (!last) nap(late, late_ms);
        add_on(rank, 1, last ? 2.0f : 1.0f, last ? other : late);
        FSDP(fsdp_reduce_grad(rank.groups[0], last ? FSDP_LAST : 0, other));
      }
      FSDP(fsdp_finish_grads(rank.model, 1, 0, other));
      CUDA(cudaStreamSynchronize(other));
      for (const fsdp_shard &shard : rank.shards())
        for (uint64_t i = 0; i < shard.element_count; ++i)
          REQUIRE(main_grad(shard)[i] == (shard.group == rank.groups[0] && shard.param_index == 1 ? 3.0f : 2.0f));
      FSDP(fsdp_discard_step(rank.model, other));
    });
}

// Main weights that lie apart may be written on any stream in the window; the compute weights are still being read.
TEST(GpuEdges, WeightsInPlaceAreWrittenAfterTheirReaders) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS})
    on_two_ranks(strategy, [](Rank &rank, cudaStream_t late, cudaStream_t other) {
      std::vector<uint16_t> before(24 * 8), seen(24 * 8);
      fsdp_tensor view = FSDP_TENSOR_INIT;
      FSDP(fsdp_unshard(rank.groups[1], FSDP_EVAL, 0, late));
      FSDP(fsdp_get_param(rank.groups[1], 0, FSDP_EVAL, &view));
      const auto read = [from = view.data](std::vector<uint16_t> &to) {
        std::memcpy(to.data(), from, to.size() * sizeof(uint16_t));
      };
      CUDA(simulated::enqueue(late, [&] { read(before); }));
      CUDA(cudaStreamSynchronize(late));
      nap(late, late_ms);
      CUDA(simulated::enqueue(late, [&] { read(seen); }));
      FSDP(fsdp_reshard(rank.groups[1], FSDP_EVAL, 0, late));
      const Stream opening;
      FSDP(fsdp_begin_update(rank.model, opening));
      for (const fsdp_shard &shard : rank.shards())
        CUDA(simulated::enqueue(other, [shard] { std::fill_n(main_weight(shard), shard.element_count, 9.0f); }));
      FSDP(fsdp_publish_weights(rank.model, other));
      CUDA(cudaStreamSynchronize(late));
      CUDA(cudaStreamSynchronize(other));
      REQUIRE(seen == before);
      for (const float weight : rank.view(1, 0, FSDP_EVAL)) REQUIRE(weight == 9.0f);
    });
}

// Each replica has one rank: nothing is refreshed, and the outer axis writes the other replicas' updates in place.
TEST(GpuEdges, WeightsInPlaceAreReadAfterThoseOfOtherReplicas) {
  for (const fsdp_strategy strategy : strategies) {
    if (strategy == FSDP_STRATEGY_NO_SHARD) continue;  // every replica updates all of it
    Scenario setup = order_scenario(Layout::flat, strategy);
    setup.mesh.replicate_size = 2;
    setup.mesh.shard_size = 1;
    setup.model.outer_strategy = FSDP_OUTER_OPTIM;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      stream();
      const size_t before = simulated::streams_of_this_thread().size();
      Rank rank(context, setup);
      const std::vector<cudaStream_t> made = simulated::streams_of_this_thread();
      rank.load();
      for (size_t s = before; s < made.size(); ++s) simulated::set_stream_delay(made[s], 10'000);
      const Stream own, reader;
      FSDP(fsdp_begin_update(rank.model, own));
      for (const fsdp_shard &shard : rank.shards())
        CUDA(simulated::enqueue(own, [shard] { std::fill_n(main_weight(shard), shard.element_count, 9.0f); }));
      FSDP(fsdp_publish_weights(rank.model, own));
      std::vector<uint16_t> seen(24 * 8);
      fsdp_tensor view = FSDP_TENSOR_INIT;
      FSDP(fsdp_unshard(rank.groups[1], FSDP_EVAL, 0, reader));
      FSDP(fsdp_get_param(rank.groups[1], 0, FSDP_EVAL, &view));
      CUDA(simulated::enqueue(reader, [&seen, from = view.data] { std::memcpy(seen.data(), from, seen.size() * 2); }));
      FSDP(fsdp_reshard(rank.groups[1], FSDP_EVAL, 0, reader));
      for (const Stream *stream : {&own, &reader}) CUDA(cudaStreamSynchronize(*stream));
      for (const uint16_t weight : seen) REQUIRE(weight == 0x4110);  // 9 as bfloat16
      FSDP(fsdp_close_context(context));
    });
  }
}

// Rank 1 waits in a collective that rank 0 never joins, and the waiting thread stands still while both ranks discard
// the step. When this thread checks again, it must still find the numbers of that round.
TEST(GpuEdges, NumbersAreRealignedWhenAllRanksAreIdle) {
  const Scenario setup = order_scenario(Layout::flat, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    stream();
    Rank rank(context, setup);
    rank.load();
    const Stream own;
    double one = 1;
    std::unique_ptr<StandStill> still;
    if (r == 1) {
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, own));
      // Rank 1 waits by now.
      pause_ms(100);
      still = std::make_unique<StandStill>("fsdp-gather", setup.ranks, 300);
    }
    FSDP(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM));
    FSDP(fsdp_discard_step(rank.model, own));
    still.reset();
    finish(rank, own);
    FSDP(fsdp_step_adamw(rank.model, 0.125, nullptr, own));
    CUDA(cudaStreamSynchronize(own));
    FSDP(fsdp_close_context(context));
  });
}

// Each check of its waits takes long, so that it is still behind a meeting that the others have left.
struct SlowWaits {
  static inline thread_local bool mine = false;
  static int32_t hook(void *) {
    if (mine) pause_ms(100);
    return 0;
  }
};

// Rank 1 is held up after the ranks have met to realign their numbers, and rank 0 is in the next step by then.
TEST(GpuEdges, ARoundWaitsForALateRank) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    Scenario setup = order_scenario(Layout::flat, strategy);
    setup.context.interrupted = SlowWaits::hook;
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      stream();
      Rank rank(context, setup);
      rank.load();
      const Stream own;
      put_all(rank, 3, 100);
      FSDP(fsdp_reduce_grad(rank.groups[3], 0, own));
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, own));
      if (r == 0) nap(own, late_ms);
      SlowWaits::mine = r == 1;
      FSDP(fsdp_discard_step(rank.model, own));
      SlowWaits::mine = false;
      finish(rank, own);
      CUDA(cudaStreamSynchronize(own));
      for (const fsdp_shard &shard : rank.shards())
        for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == 2.0f);
      FSDP(fsdp_discard_step(rank.model, own));
      FSDP(fsdp_close_context(context));
    });
  }
}

// The model's memory goes away on a stream that does not wait. A kernel that read it then would end the process.
TEST(GpuEdges, AModelIsDestroyedAfterItsReaders) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = order_scenario(Layout::flat, strategy);
    simulated::set_strict(true);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      stream();
      const Stream late;
      std::vector<std::byte> seen(24 * 8 * 2);
      {
        Rank rank(context, setup);
        rank.load();
        fsdp_tensor view = FSDP_TENSOR_INIT;
        FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, late));
        FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_EVAL, &view));
        nap(late, late_ms);
        CUDA(simulated::enqueue(late, [&seen, from = view.data] { std::memcpy(seen.data(), from, seen.size()); }));
        FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, late));
      }
      CUDA(cudaStreamSynchronize(late));
      FSDP(fsdp_close_context(context));
    });
    simulated::set_strict(false);
  }
}

TEST(GpuEdges, AModelIsDestroyedAfterItsReduces) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = order_scenario(Layout::flat, strategy);
    simulated::set_strict(true);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      stream();
      {
        LibraryStreams library;
        Rank rank(context, setup);
        library.find();
        rank.load();
        library.delay(Late::reduces);
        reduce_all(rank, 1);
      }
      FSDP(fsdp_close_context(context));
    });
    simulated::set_strict(false);
  }
}

}  // namespace
