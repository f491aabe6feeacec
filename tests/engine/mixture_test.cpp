// SPDX-License-Identifier: Apache-2.0
// Groups with meshes of their own, in one model: experts, and tensor-parallel ranks.
#include "mixture.h"

#include <gtest/gtest.h>

#include "device.h"

using namespace harness;

namespace {

Mixture mixture_of(uint32_t ranks, uint32_t experts, fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS,
                   fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Mixture mixture;
  mixture.job = scenario_of(strategy, ranks, mode);
  mixture.experts = experts;
  return mixture;
}

void expect_as_alone(const Mixture &mixture, const std::string &what) {
  EXPECT_EQ(mixture_difference(train_mixture(mixture), train_alone(mixture)), "") << what;
}

TEST(Mixture, TrainsLikeOneProcessWithEveryStrategy) {
  Sample sample(5);
  for (const fsdp_strategy dense : strategies)
    for (const fsdp_strategy experts : strategies)
      for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
        for (const uint32_t microbatches : {1u, 3u}) {
          if ((on_gpu() && (mode == FSDP_UNSHARD_MAPPED || microbatches == 1)) || !sample.takes_next()) continue;
          Mixture mixture = mixture_of(4, 2, dense, mode);
          mixture.expert_strategy = experts;
          mixture.job.microbatches = microbatches;
          expect_as_alone(mixture, "dense " + std::to_string(dense) + ", experts " + std::to_string(experts) +
                                       ", mode " + std::to_string(mode) + ", " + std::to_string(microbatches));
        }
}

// Dense groups are replicated 2 x 4, and the experts of one mesh 1 x 8, 2 x 4 and 4 x 2.
TEST(Mixture, MeshShapesMayDifferBetweenGroups) {
  Sample sample(3);
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM})
      for (const uint32_t replicas : {1u, 2u, 4u})
        for (const uint32_t experts : {1u, 2u}) {
          if (!sample.takes_next()) continue;
          Mixture mixture = mixture_of(8, experts, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, mode);
          mixture.dense_replicas = 2, mixture.expert_replicas = replicas;
          mixture.job.model.outer_strategy = outer;
          mixture.job.microbatches = 2;
          expect_as_alone(mixture, std::to_string(replicas) + " replicas, " + std::to_string(experts) + " meshes");
        }
}

// Main weights of dense groups are divided among replicas, and the experts have each strategy.
TEST(Mixture, DividesDenseStatesAmongReplicas) {
  for (const fsdp_strategy dense : strategies)
    for (const fsdp_strategy experts : strategies) {
      Mixture mixture = mixture_of(4, 2, dense);
      mixture.dense_replicas = 2;
      mixture.job.model.outer_strategy = FSDP_OUTER_OPTIM;
      mixture.expert_strategy = experts;
      expect_as_alone(mixture, std::to_string(dense) + " and " + std::to_string(experts));
    }
}

// No group is on the model's mesh: dense meshes are {0, 4}, {1, 5}, ..., expert meshes {0, 2, 4, 6} and {1, 3, 5, 7}.
TEST(Mixture, MeshesOfTensorParallelRanksCrossThoseOfExperts) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Mixture mixture = mixture_of(8, 2, strategy, mode);
      mixture.tensors = 4;
      mixture.job.model.grad_op = FSDP_GRAD_OP_FACTOR;
      mixture.job.model.grad_factor = 0.5;
      expect_as_alone(mixture, std::to_string(strategy) + ", mode " + std::to_string(mode));
    }
}

TEST(Mixture, AMeshMayHaveOneRank) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      expect_as_alone(mixture_of(2, 2, strategy, mode), std::to_string(strategy));
}

TEST(Mixture, TrainsWithEverySchedule) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const fsdp_schedule_kind schedule :
         {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED, FSDP_SCHEDULE_VISITS, FSDP_SCHEDULE_ANY})
      for (const bool debug : {false, true}) {
        Mixture mixture = mixture_of(4, 2, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, mode);
        if (debug) mixture.job.context.flags = FSDP_CONTEXT_DEBUG;
        mixture.job.schedule = schedule;
        mixture.job.microbatches = 2;
        for (uint32_t g = 0; schedule == FSDP_SCHEDULE_VISITS && g < 4; ++g)
          mixture.job.visits.push_back({g, FSDP_FORWARD, 0});
        for (uint32_t g = 4; schedule == FSDP_SCHEDULE_VISITS && g-- > 0;)
          mixture.job.visits.push_back({g, FSDP_BACKWARD, 0});
        mixture.job.prefetch_small_groups();
        expect_as_alone(mixture, "schedule " + std::to_string(schedule) + ", mode " + std::to_string(mode) +
                                     (debug ? ", debug" : ""));
      }
}

TEST(Mixture, DividesItsFullGradientsIntoParts) {
  for (const uint64_t bytes : {12'000u, 9'000u}) {
    Mixture mixture = mixture_of(4, 2);
    mixture.job.model.max_pending_bytes = bytes;
    expect_as_alone(mixture, std::to_string(bytes));
  }
}

TEST(Mixture, KeepsExpertsInFewerBits) {
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_quantization quantization : {0, FSDP_QUANTIZE_MXFP8 + 0, FSDP_QUANTIZE_FP8_BLOCK + 0})
      for (const fsdp_main_storage storage : {0, FSDP_MAIN_SPLIT16 + 0}) {
        if (quantization && storage) continue;
        Mixture mixture = mixture_of(4, 2, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
        mixture.expert_strategy = strategy;
        mixture.quantization = quantization, mixture.expert_storage = storage;
        mixture.job.model.optimizer = storage ? FSDP_OPTIMIZER_ADAMW_8BIT + 0 : FSDP_OPTIMIZER_ADAMW + 0;
        mixture.job.model.grad_dtype = FSDP_FLOAT32;
        expect_as_alone(mixture, std::to_string(strategy) + ", quantization " + std::to_string(quantization) +
                                     ", storage " + std::to_string(storage));
      }
}

// Each host has two ranks. Ranks of a mesh are on different hosts, or neighbours on one host.
TEST(Mixture, MeshesLieOnSeveralHosts) {
  for (const uint32_t experts : {1u, 2u, 4u})
    for (const fsdp_strategy strategy : strategies) {
      Mixture mixture = mixture_of(4, experts, strategy);
      mixture.job.context.ranks_per_host = 2;
      mixture.job.microbatches = 2;
      expect_as_alone(mixture, std::to_string(experts) + " meshes, " + std::to_string(strategy));
    }
}

}  // namespace
