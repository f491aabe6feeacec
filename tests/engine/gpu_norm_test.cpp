// SPDX-License-Identifier: Apache-2.0
// Norms over simulated GPUs for which no caller waits: when they are computed, what they scale, and in which order.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>

#include "device.h"
#include "gpu_order.h"
#include "simulated_cuda/simulated.h"

using namespace order;

namespace {

struct Case {
  Layout layout;
  fsdp_strategy strategy;
};

// A second test runs them so.
bool by_nccl() { return std::getenv("FSDP_NCCL_LIBRARY") != nullptr; }

// The norm of gradients that are equal everywhere; the sums of their squares are exact.
double norm_of(const Scenario &setup, double value) {
  uint64_t elements = 0;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) elements += param.count();
  return std::sqrt(value * value * static_cast<double>(elements));
}

void meet(Rank &rank) {
  double one = 1;
  FSDP(fsdp_all_reduce_values(rank.context, nullptr, &one, 1, FSDP_VALUE_SUM));
}

void require_grads(Rank &rank, float value) {
  for (const fsdp_shard &shard : rank.shards())
    for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == value);
}

// Every rank with the gradients of a finished step, and two streams.
using NormBody = std::function<void(Rank &, const LibraryStreams &, cudaStream_t, cudaStream_t)>;
void run(const Case &with, const NormBody &body) {
  Scenario setup = order_scenario(with.layout, with.strategy);
  if (by_nccl()) setup.context.device_transport = FSDP_TRANSPORT_NCCL;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    stream();
    LibraryStreams library;
    Rank rank(context, setup);
    if (!by_nccl()) library.find();
    rank.load();
    const Stream one, other;
    reduce_all(rank, 2);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, one));
    CUDA(cudaStreamSynchronize(one));
    body(rank, library, one, other);
    for (const Stream *stream : {&one, &other}) CUDA(cudaStreamSynchronize(*stream));
    FSDP(fsdp_close_context(context));
  });
}

class GpuNorm : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Meshes, GpuNorm,
    testing::Values(Case{Layout::one, FSDP_STRATEGY_OPTIM_GRADS_PARAMS},
                    Case{Layout::flat, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}, Case{Layout::flat, FSDP_STRATEGY_NO_SHARD},
                    Case{Layout::hsdp, FSDP_STRATEGY_OPTIM_GRADS},
                    Case{Layout::hfsdp, FSDP_STRATEGY_OPTIM_GRADS_PARAMS},
                    Case{Layout::hosts, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}, Case{Layout::hosts, FSDP_STRATEGY_NO_SHARD}),
    [](const auto &info) {
      return std::string(layout_names[static_cast<size_t>(info.param.layout)]) + std::to_string(info.param.strategy);
    });

// No work of the GPU starts before every rank has made its calls.
TEST_P(GpuNorm, ANormThatIsNotReadIsNotWaitedFor) {
  const Scenario setup = order_scenario(GetParam().layout, GetParam().strategy);
  const double norm = norm_of(setup, 2);
  std::optional<simulated::Hold> hold;
  run(GetParam(), [&](Rank &rank, const LibraryStreams &, cudaStream_t one, cudaStream_t other) {
    meet(rank);
    if (rank.rank == 0) hold.emplace();
    meet(rank);
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, one, nullptr));
    FSDP(fsdp_clip_grads(rank.model, nullptr, norm / 4, other, nullptr));
    meet(rank);
    if (rank.rank == 0) hold.reset();
    double last = 0;
    FSDP(fsdp_get_last_norm(rank.model, &last));
    REQUIRE(last == norm);
    CUDA(cudaStreamSynchronize(other));
    require_grads(rank, 0.5f);
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, other));
  });
}

// Ranks that read the value and ranks that do not make the same calls.
TEST_P(GpuNorm, OneRankMayReadWhatTheOthersDoNot) {
  const Scenario setup = order_scenario(GetParam().layout, GetParam().strategy);
  run(GetParam(), [&](Rank &rank, const LibraryStreams &, cudaStream_t one, cudaStream_t) {
    double norm = 0, before = 0, last = 0;
    const bool reads = rank.rank == 0;
    FSDP(fsdp_clip_grads(rank.model, nullptr, 1e9, one, reads ? &before : nullptr));
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, one, reads ? &norm : nullptr));
    REQUIRE(!reads || (norm == norm_of(setup, 2) && before == norm));
    FSDP(fsdp_get_last_norm(rank.model, &last));
    REQUIRE(last == norm_of(setup, 2));
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, one));
  });
}

// Each share is read before the next one is written, and each factor before the next one is computed. The caller's
// streams take turns, and either of the library's streams is late.
TEST_P(GpuNorm, ManyThatAreNotWaitedForKeepTheirOrder) {
  const Scenario setup = order_scenario(GetParam().layout, GetParam().strategy);
  for (const Late late : {Late::nobody, Late::reduces, Late::outer}) {
    const bool has_outer = setup.mesh.replicate_size > 1 || setup.context.ranks_per_host;
    if (late == Late::outer && !has_outer) continue;
    // Only over staging is it known which stream is which.
    if (late != Late::nobody && by_nccl()) continue;
    run(GetParam(), [&](Rank &rank, const LibraryStreams &library, cudaStream_t one, cudaStream_t other) {
      if (rank.rank == 1 || setup.ranks == 1) library.delay(late);
      float value = 2;
      for (int i = 0; i < 4; ++i) {
        const cudaStream_t first = i % 2 ? one : other, second = i % 2 ? other : one;
        nap(first, 5);
        FSDP(fsdp_clip_grads(rank.model, nullptr, norm_of(setup, value) / 2, first, nullptr));  // halves them
        FSDP(fsdp_scale_grads(rank.model, 8, second));
        value *= 4;
      }
      double norm = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, other, &norm));
      REQUIRE(norm == norm_of(setup, value));
      require_grads(rank, value);
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, one));
    });
  }
}

// The norm is still found; later steps contain nothing of it.
TEST_P(GpuNorm, OfAStepThatIsDiscardedIsStillFound) {
  const Scenario setup = order_scenario(GetParam().layout, GetParam().strategy);
  run(GetParam(), [&](Rank &rank, const LibraryStreams &library, cudaStream_t one, cudaStream_t other) {
    if (rank.rank == 1 && !by_nccl()) library.delay(Late::reduces);
    nap(one, 20);
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, one, nullptr));
    FSDP(fsdp_discard_step(rank.model, other));
    double norm = 0;
    FSDP(fsdp_get_last_norm(rank.model, &norm));
    REQUIRE(norm == norm_of(setup, 2));
    reduce_all(rank, 4);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, other));
    FSDP(fsdp_clip_grads(rank.model, nullptr, norm_of(setup, 4) / 2, other, nullptr));
    FSDP(fsdp_get_last_norm(rank.model, &norm));
    REQUIRE(norm == norm_of(setup, 4));
    CUDA(cudaStreamSynchronize(other));
    require_grads(rank, 2);
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, other));
  });
}

// The callers compare in a meeting first, so nothing is enqueued if they differ.
TEST(GpuNorms, ThatRanksAskForDifferentlyAreRefusedAtOnce) {
  const Case with{Layout::flat, FSDP_STRATEGY_OPTIM_GRADS_PARAMS};
  const double norm = norm_of(order_scenario(with.layout, with.strategy), 2);
  run(with, [&](Rank &rank, const LibraryStreams &, cudaStream_t one, cudaStream_t) {
    double last = 0;
    require_error(fsdp_clip_grads(rank.model, nullptr, rank.rank ? 1 : 2, one, nullptr), FSDP_MISMATCH,
                  {"rank 1 asked for max_norm 1, rank 0 for max_norm 2; nothing was scaled"});
    require_error(fsdp_get_last_norm(rank.model, &last), FSDP_INVALID_STATE, {"no norm was measured"});
    FSDP(fsdp_clip_grads(rank.model, nullptr, norm / 2, one, nullptr));
    CUDA(cudaStreamSynchronize(one));
    require_grads(rank, 1);
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, one));
  });
}

// Models of two ranks each, and the norm of both: the host adds, and waits.
TEST(GpuNorms, OverAFurtherMeshAreAddedByTheHost) {
  const Scenario setup = order_scenario(Layout::hsdp, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    stream();
    Scenario own = setup;
    const std::vector<uint32_t> stage = r < 2 ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{2, 3};
    own.mesh.ranks = stage.data();
    own.mesh.rank_count = 2;
    own.mesh.replicate_size = 1;
    own.mesh.shard_size = 2;
    Rank rank(context, own);
    rank.load();
    fsdp_mesh *stages = make_mesh(context, {r % 2, r % 2 + 2});
    reduce_all(rank, 2);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    double last = 0;
    FSDP(fsdp_clip_grads(rank.model, nullptr, 1e9, stream(), nullptr));
    FSDP(fsdp_clip_grads(rank.model, stages, std::sqrt(2 * norm_of(setup, 2) * norm_of(setup, 2)) / 2, stream(),
                         nullptr));
    FSDP(fsdp_get_last_norm(rank.model, &last));
    REQUIRE(std::abs(last / norm_of(setup, 2) - std::sqrt(2.0)) < 1e-12);
    CUDA(cudaStreamSynchronize(stream()));
    require_grads(rank, 1);
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, stream()));
    fsdp_destroy_mesh(stages);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
