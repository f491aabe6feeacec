// SPDX-License-Identifier: Apache-2.0
// An optimizer of the caller's own on shards at home in a file, chunk by chunk.
#include "ranks.h"

namespace {

constexpr std::uint64_t rows = 100, columns = 300, count = rows * columns;

fsdp::ModelOptions in_file() {
  fsdp::ModelOptions options;
  options.state_home = options.main_home = FSDP_HOME_FILE;
  options.home_directory = "/var/tmp";
  options.turn_bytes = 65536;
  options.grad_dtype = FSDP_FLOAT32;
  return options;
}

/** The caller updates "w", and AdamW updates "b". */
struct Net {
  explicit Net(const fsdp::Context &context, const fsdp::ModelOptions &options) : model(context, options) {
    std::vector<fsdp::Param> params = {fsdp::Param("w", {rows, columns}, fsdp::DType::bfloat16),
                                       fsdp::Param("b", {columns}, fsdp::DType::bfloat16)};
    params[0].optimizer = FSDP_OPTIMIZER_CALLER;
    group = model.create_group("layer", params);
    model.add_optimizer_state("momentum", fsdp::DType::float32);
    model.seal();
    group.load_param("w", ramp(count));
    model.publish_weights();
  }
  void finish_grads() {
    group.put_grad("w", ramp(count));
    group.put_grad("b", ramp(columns));
    group.reduce_grad(FSDP_LAST);
    model.finish_grads();
  }

  fsdp::Model model;
  fsdp::Group group;
};

/** SGD with momentum, in numbers that are exact. */
void update(const fsdp::ShardChunk &chunk) {
  const auto momentum = chunk.state("momentum").as<float>();
  const auto weights = chunk.main_weight();
  const auto grads = chunk.main_grad();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    momentum[i] = 0.5f * momentum[i] + grads[i];
    weights[i] -= 0.25f * momentum[i];
  }
}

TEST(ShardChunks, ComeOneAfterTheOtherToAnOwnOptimizer) {
  run_ranks(2, [](const fsdp::Context &context) {
    Net net(context, in_file());
    std::uint64_t elements = 0;
    for (int step = 0; step < 2; ++step) {
      net.finish_grads();
      fsdp::for_each_shard_chunk(net.model, [&](const fsdp::ShardChunk &chunk) {
        EXPECT_EQ(chunk.name(), "w");
        EXPECT_LE(chunk.element_count(), 8192u);
        elements += chunk.element_count();
        update(chunk);
      });
      net.model.step_adamw(0.5);
    }
    EXPECT_EQ(elements, count);  // half of them in each of two steps
    const std::vector<float> expected = ramp(count), weights = net.group.read_param<float>("w"),
                             momentum = net.group.read_state<float>("w", "momentum");
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(weights[i], expected[i] - 0.625f * expected[i]) << i;
      ASSERT_EQ(momentum[i], 1.5f * expected[i]) << i;
    }
  });
}

TEST(ShardChunks, AreRefusedOutsideOfTheWindowAndKeepItOpen) {
  run_ranks(1, [](const fsdp::Context &context) {
    Net net(context, in_file());
    EXPECT_THROW(net.model.shard_chunks().next(), fsdp::Error);
    net.finish_grads();
    EXPECT_TRUE(net.model.shard_chunks().next().has_value());
    EXPECT_THROW(net.model.step_adamw(0.5), fsdp::Error);
    fsdp::for_each_shard_chunk(net.model, update);  // the chunks that are left
    net.model.step_adamw(0.5);
  });
}

TEST(ShardChunks, AreNoneOfAModelInMemory) {
  run_ranks(1, [](const fsdp::Context &context) {
    Net net(context, {});
    net.finish_grads();
    EXPECT_FALSE(net.model.shard_chunks().next().has_value());
    net.model.publish_weights();
  });
}

}  // namespace
