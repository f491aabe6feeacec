// SPDX-License-Identifier: Apache-2.0
// Captures one group's forward and backward passes, or the whole iteration, with gathers and reduces in the graph or
// outside of it. Outside of the graph ranks may also exchange through memory of the host. All captures have the bits of
// eager steps.
#include <gtest/gtest.h>

#include <memory>

#include "graph.h"

using namespace harness;

namespace {

// The layers' math: forward leaves an activation, which backward reads beside the weights.
class Math {
 public:
  explicit Math(Rank &rank) : rank_(rank) {
    for (size_t g = 0; g < rank.groups.size(); ++g) {
      counts_.push_back(rank.def(g).params[0].count());
      void *data = nullptr;
      CUDA(cudaMalloc(&data, counts_[g] * sizeof(float)));
      activations_.push_back(static_cast<float *>(data));
    }
  }
  ~Math() {
    for (float *data : activations_) cudaFree(data);
  }
  Math(const Math &) = delete;
  Math &operator=(const Math &) = delete;

  void forward(size_t g, cudaStream_t stream) {
    fsdp_tensor weight = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_param(rank_.groups[g], 0, FSDP_FORWARD, &weight));
    CUDA(simulated::enqueue(stream,
                            [from = static_cast<const float *>(weight.data), to = activations_[g], count = counts_[g]] {
                              for (uint64_t i = 0; i < count; ++i) to[i] = 0.5f * from[i];
                            }));
  }
  void backward(size_t g, cudaStream_t stream) {
    enqueue_grads(rank_, g, stream);
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    FSDP(fsdp_acquire_grad(rank_.groups[g], 0, 0, stream, &grad, &accumulate));
    REQUIRE(accumulate == 1);
    CUDA(simulated::enqueue(stream, [from = activations_[g], to = static_cast<float *>(grad.data), count = counts_[g],
                                     factor = 0.125f * static_cast<float>(rank_.rank + 1)] {
      for (uint64_t i = 0; i < count; ++i) to[i] += factor * from[i];
    }));
  }

 private:
  Rank &rank_;
  std::vector<uint64_t> counts_;
  std::vector<float *> activations_;
};

// Holds the group, or each of its pieces by itself.
void unshard(Rank &rank, size_t g, fsdp_phase phase, cudaStream_t stream) {
  if (!rank.setup.by_piece) return FSDP(fsdp_unshard(rank.groups[g], phase, 0, stream));
  for (uint32_t p = 0; p < rank.def(g).pieces(); ++p) FSDP(fsdp_unshard_piece(rank.groups[g], p, phase, 0, stream));
}

void reshard(Rank &rank, size_t g, fsdp_phase phase, cudaStream_t stream) {
  if (!rank.setup.by_piece) return FSDP(fsdp_reshard(rank.groups[g], phase, 0, stream));
  for (uint32_t p = 0; p < rank.def(g).pieces(); ++p) FSDP(fsdp_reshard_piece(rank.groups[g], p, phase, 0, stream));
}

void eager_step(Rank &rank, Math &math, cudaStream_t stream, double lr) {
  for (size_t g = 0; g < rank.groups.size(); ++g) {
    unshard(rank, g, FSDP_FORWARD, stream);
    math.forward(g, stream);
    reshard(rank, g, FSDP_FORWARD, stream);
  }
  for (size_t g = rank.groups.size(); g-- > 0;) {
    unshard(rank, g, FSDP_BACKWARD, stream);
    math.backward(g, stream);
    reshard(rank, g, FSDP_BACKWARD, stream);
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream));
  }
  update(rank, stream, lr);
}

// Captured at the first use, replayed at each.
class Lazy {
 public:
  void replay(Rank &rank, cudaStream_t stream, double lr, const std::function<void()> &part) {
    if (!graph_) graph_ = std::make_unique<Graph>(rank, stream, part);
    graph_->replay(lr);
  }

 private:
  std::unique_ptr<Graph> graph_;
};

// Forward and backward of the groups that are to be captured as graphs of their own, of others eager.
struct GroupGraphs {
  GroupGraphs(bool inside, size_t only) : inside(inside), only(only) {}

  void step(Rank &rank, Math &math, cudaStream_t stream, double lr) {
    for (size_t g = 0; g < rank.groups.size(); ++g) {
      const auto gathered = [&] { math.forward(g, stream); };
      visit(rank, g, FSDP_FORWARD, stream, forward[g], gathered, [] {});
    }
    for (size_t g = rank.groups.size(); g-- > 0;) {
      const auto gathered = [&] { math.backward(g, stream); };
      visit(rank, g, FSDP_BACKWARD, stream, backward[g], gathered,
            [&] { FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream)); });
    }
    update(rank, stream, lr);
  }

  void visit(Rank &rank, size_t g, fsdp_phase phase, cudaStream_t stream, Lazy &graph,
             const std::function<void()> &work, const std::function<void()> &reduce) {
    const auto unshard = [&] { FSDP(fsdp_unshard(rank.groups[g], phase, 0, stream)); };
    const auto leave = [&] {
      FSDP(fsdp_reshard(rank.groups[g], phase, 0, stream));
      reduce();
    };
    const bool captured = only == SIZE_MAX || only == g;
    const auto all = [&] {
      unshard();
      work();
      leave();
    };
    if (!captured) return all();
    if (inside) return graph.replay(rank, stream, 0, all);
    unshard();
    graph.replay(rank, stream, 0, work);
    leave();
  }

  bool inside;
  size_t only;  // SIZE_MAX: all groups
  Lazy forward[4], backward[4];
};

// All math of an iteration in one graph, with all weights gathered before it and all gradients reduced behind it.
void step_with_math_in_graph(Rank &rank, Math &math, cudaStream_t stream, double lr, Lazy &graph) {
  for (fsdp_group *group : rank.groups) FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, stream));
  for (fsdp_group *group : rank.groups) FSDP(fsdp_unshard(group, FSDP_BACKWARD, 0, stream));
  graph.replay(rank, stream, 0, [&] {
    for (size_t g = 0; g < rank.groups.size(); ++g) math.forward(g, stream);
    for (size_t g = rank.groups.size(); g-- > 0;) math.backward(g, stream);
  });
  for (fsdp_group *group : rank.groups) {
    FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, stream));
    FSDP(fsdp_reshard(group, FSDP_BACKWARD, 0, stream));
  }
  for (size_t g = rank.groups.size(); g-- > 0;) FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream));
  update(rank, stream, lr);
}

using Step = std::function<void(Rank &, Math &, cudaStream_t, double)>;

// Each maker is called once on each rank. The first step is eager, because NCCL initializes itself in it.
void expect_eager_bits(const Scenario &setup, const std::vector<std::function<Step()>> &makers) {
  const auto train = [&](const std::function<Step()> &make) {
    return run(setup, [&](Rank &rank, cudaStream_t stream) {
      Math math(rank);
      eager_step(rank, math, stream, lr_of(0));
      {
        const Step own = make();
        for (int i = 1; i < steps; ++i) own(rank, math, stream, lr_of(i));
      }
      CUDA(cudaStreamSynchronize(stream));
    });
  };
  const Weights expected = train([] { return Step(eager_step); });
  for (const auto &make_step : makers)
    EXPECT_TRUE(same_bits(train(make_step), expected))
        << "strategy " << setup.model.strategy << ", ranks " << setup.ranks << ", transport "
        << setup.context.device_transport;
}

// Scenarios with gathers and reduces in the graph, or outside of it. Several ranks run only the two strategies that
// exchange the most and the least. Whole steps of all strategies over NCCL are in capture_test.cpp.
std::vector<Scenario> scenarios(fsdp_strategy strategy, bool inside) {
  std::vector<Scenario> setups = {graph_scenario(strategy)};
  if (strategy != FSDP_STRATEGY_NO_SHARD && strategy != FSDP_STRATEGY_OPTIM_GRADS_PARAMS) return setups;
  if (!inside) setups.push_back(graph_scenario(strategy, 2));
  if (has_nccl()) setups.push_back(nccl_scenario(strategy, 2));
  return setups;
}

void expect_of_groups(bool inside) {
  for (const fsdp_strategy strategy : strategies)
    for (const Scenario &setup : scenarios(strategy, inside)) {
      const auto maker = [inside](size_t only) {
        return [=]() -> Step {
          auto graphs = std::make_shared<GroupGraphs>(inside, only);
          return [graphs](Rank &rank, Math &math, cudaStream_t stream, double lr) {
            graphs->step(rank, math, stream, lr);
          };
        };
      };
      expect_eager_bits(setup, {maker(1), maker(SIZE_MAX)});
    }
}

TEST(CaptureParts, OneGroupsForwardAndBackwardWithGatherAndReduceInside) { expect_of_groups(true); }

TEST(CaptureParts, OneGroupsForwardAndBackwardWithGatherAndReduceOutside) { expect_of_groups(false); }

TEST(CaptureParts, TheWholeIterationWithGatherAndReduceInside) {
  for (const fsdp_strategy strategy : strategies)
    for (const Scenario &setup : scenarios(strategy, true))
      expect_eager_bits(setup, {[]() -> Step {
                          auto graph = std::make_shared<Lazy>();
                          return [graph](Rank &rank, Math &math, cudaStream_t stream, double lr) {
                            graph->replay(rank, stream, lr, [&] { eager_step(rank, math, stream, 0); });
                          };
                        }});
}

TEST(CaptureParts, TheWholeIterationWithGathersOfPiecesInside) {
  for (Scenario setup : scenarios(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, true)) {
    setup.by_piece = true;
    for (GroupDef &group : setup.groups) {
      group.params.push_back({group.name + ".last", {5, 8}});
      group.params.back().piece = group.params[group.params.size() - 2].piece + 1;
    }
    expect_eager_bits(setup, {[]() -> Step {
                        auto graph = std::make_shared<Lazy>();
                        return [graph](Rank &rank, Math &math, cudaStream_t stream, double lr) {
                          graph->replay(rank, stream, lr, [&] { eager_step(rank, math, stream, 0); });
                        };
                      }});
  }
}

TEST(CaptureParts, TheWholeIterationWithGatherAndReduceOutside) {
  for (const fsdp_strategy strategy : strategies)
    for (Scenario setup : scenarios(strategy, false)) {
      setup.model.max_pending_groups = 4;  // all gradients are there before the first reduce
      for (GroupDef &group : setup.groups) group.options.flags = FSDP_GROUP_RESIDENT;
      expect_eager_bits(setup, {[]() -> Step {
                          auto graph = std::make_shared<Lazy>();
                          return [graph](Rank &rank, Math &math, cudaStream_t stream, double lr) {
                            step_with_math_in_graph(rank, math, stream, lr, *graph);
                          };
                        }});
    }
}

}  // namespace
