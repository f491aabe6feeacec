// SPDX-License-Identifier: Apache-2.0
// Tests how often the ranks of a model meet in the calls that end a step. In a successful run they meet once per call,
// whatever they report.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "engine/model/model.h"

namespace fsdp::engine {
namespace {

constexpr auto call = "test";
constexpr uint32_t ranks = 3;

struct Met {
  uint64_t publish = 0, finish = 0, step = 0;
  bool operator==(const Met &) const = default;
};

std::shared_ptr<Model> make_model(const std::shared_ptr<Context> &context) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(ranks);
  auto model = std::make_shared<Model>(context, spec, FSDP_OPTIMIZER_ADAMW, GroupDefaults{});
  memory::GroupSpec group;
  group.name = "layer";
  memory::ParamSpec weight;
  weight.name = "weight";
  weight.shape = {12, 4};
  weight.element_count = 48;
  group.params.push_back(weight);
  model->declaration().add_group(std::move(group), layout::one_axis(ranks));
  model->seal();
  return model;
}

Met take_steps(Model &model, int steps) {
  const transport::Team &team = model.runtime(call).team();
  UpdateWindow &update = model.update(call);
  Met met;
  const auto count = [&](uint64_t &meetings, const auto &body) {
    const uint64_t before = team.meetings();
    body();
    meetings += team.meetings() - before;
  };
  count(met.publish, [&] { update.publish(nullptr); });
  for (int i = 0; i < steps; ++i) {
    model.reducer(call).put(model.runtime(call).groups[0], 0, nullptr, FSDP_FLOAT32, 48, 0, nullptr);
    model.reducer(call).reduce(model.runtime(call).groups[0], FSDP_LAST, nullptr);
    count(met.finish, [&] { update.finish_grads(1.0, 0, nullptr); });
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    count(met.step, [&] { update.step_adamw(0.1, options, nullptr); });
  }
  return met;
}

TEST(StepMeetings, AreOneForEachCallThatEndsAStep) {
  constexpr int steps = 4;
  const fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  auto contexts = Context::create_local(ranks, options);
  std::vector<Met> met(ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const auto model = make_model(contexts[r]);
      met[r] = take_steps(*model, steps);
    });
  for (std::thread &thread : threads) thread.join();
  for (const Met &of : met) EXPECT_EQ(of, (Met{1, steps, steps}));
}

}  // namespace
}  // namespace fsdp::engine
