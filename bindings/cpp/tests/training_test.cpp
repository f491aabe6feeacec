// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

namespace {

void expect_trained(const std::vector<float> &found, std::size_t count, int steps, double lr) {
  ASSERT_EQ(found.size(), count);
  for (std::size_t i = 0; i < count; ++i) EXPECT_NEAR(found[i], adamw(ramp(count)[i], steps, lr), 4e-6);  // fp32
}

TEST(Training, EveryStrategyTrainsAsOneWholeCopyDoes) {
  for (const std::uint32_t world_size : {1u, 2u, 4u})
    for (const fsdp_strategy strategy :
         {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
      run_ranks(world_size, [&](fsdp::Context &context) {
        fsdp::ModelOptions options;
        options.strategy = strategy;
        TwoGroups net(context, options);
        for (int step = 0; step < 5; ++step) net.step(0.125);
        expect_trained(net.first.read_param<float>("first.weight"), 12, 5, 0.125);
        expect_trained(net.first.read_param<float>("first.bias"), 4, 5, 0.125);
        expect_trained(net.second.read_param<float>(0), 10, 5, 0.125);
        EXPECT_EQ(net.model.stats().step, 5u);
        context.close();
      });
}

TEST(Training, ViewsAreTypedSpansOfTheLibrarysMemory) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    fsdp::Weights weights = net.first.unshard(fsdp::Phase::forward);
    fsdp::span<const float> w = weights["first.weight"];
    EXPECT_EQ(std::vector<float>(w.begin(), w.end()), ramp(12));
    EXPECT_EQ(weights["first.weight"].data(), net.first.get_param(0, fsdp::Phase::forward).data());
    EXPECT_EQ(weights["first.weight"].shape()[0], 3u);
    EXPECT_EQ(weights.get<float>(1).size(), 4u);
    EXPECT_EQ(status_of([&] { weights["first.weight"].as<const fsdp::bfloat16>(); }), fsdp::Status::invalid_argument);
    EXPECT_EQ(status_of([&] { weights["first.weight"].as<float>(); }), fsdp::Status::invalid_argument);  // read-only
    EXPECT_EQ(status_of([&] { weights["no such"]; }), fsdp::Status::invalid_argument);
    EXPECT_EQ(status_of([&] { weights[2]; }), fsdp::Status::invalid_argument);
    weights.reshard();
    EXPECT_EQ(status_of([&] { weights[0]; }), fsdp::Status::invalid_state);
    context.close();
  });
}

// Three groups of different values take turns in two buffers, so that weights move.
TEST(Training, WeightsAreReadWhereTheirOwnHoldHasThem) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::ModelOptions options;
    options.unshard_mode = FSDP_UNSHARD_COPIED;
    fsdp::Model model(context, options);
    std::vector<fsdp::Group> groups = {model.create_group("a", {fsdp::Param("a", {6})})};
    model.set_schedule(fsdp::ScheduleKind::any, {}, 2);  // also of groups that are created later
    for (const char *name : {"b", "c"}) groups.push_back(model.create_group(name, {fsdp::Param(name, {6})}));
    model.seal();
    for (std::size_t g = 0; g < 3; ++g) groups[g].load_param(0, std::vector<float>(6, static_cast<float>(g)));
    model.publish_weights();
    std::array<std::set<const void *>, 3> addresses;
    for (std::size_t turn = 0; turn < 6; ++turn) {
      const std::size_t held[] = {turn % 3, (turn + 1) % 3};
      std::vector<fsdp::Weights> holds;
      for (const std::size_t g : held) holds.push_back(groups[g].unshard(fsdp::Phase::forward));
      for (std::size_t i = 0; i < 2; ++i) {
        const fsdp::span<const float> seen = holds[i][0];
        EXPECT_EQ(std::vector<float>(seen.begin(), seen.end()), std::vector<float>(6, static_cast<float>(held[i])));
        addresses[held[i]].insert(seen.data());
      }
      EXPECT_EQ(status_of([&] { (void)groups[(turn + 2) % 3].unshard(fsdp::Phase::forward); }),
                fsdp::Status::invalid_state);
    }
    for (std::size_t g = 0; g < 3; ++g) EXPECT_EQ(addresses[g].size(), 2U) << "the weights of group " << g;
    context.close();
  });
}

TEST(Training, QuantizedParametersAreCodesAndScales) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Group group = model.create_group("only", {fsdp::Param("w", {1, 2}).quantize(fsdp::Quantization::fp8_block)});
    model.seal();
    group.load_param("w", std::vector<float>{448, 1});
    model.publish_weights();
    const fsdp::Weights weights = group.unshard(fsdp::Phase::forward);
    fsdp::span<const fsdp::float8_e4m3> codes = group.get_plane("w", fsdp::Phase::forward, fsdp::Plane::row);
    ASSERT_EQ(codes.size(), 2u);
    EXPECT_EQ(codes[0].bits, 0x7e);
    EXPECT_EQ(codes[1].bits, 0x38);
    fsdp::span<const float> scales = group.get_plane(0, fsdp::Phase::forward, fsdp::Plane::row_scale);
    EXPECT_EQ(std::vector<float>(scales.begin(), scales.end()), std::vector<float>{1});
    EXPECT_FALSE(weights["w"]);
    EXPECT_EQ(status_of([&] { weights["w"].as<const float>(); }), fsdp::Status::invalid_state);
  });
}

TEST(Training, FrozenPlanesAndBytesAreLoadedAsTheyAre) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Group group = model.create_group(
        "base", {fsdp::Param("q", {1, 2}, fsdp::DType::float32, FSDP_PARAM_FROZEN).quantize(fsdp::Quantization::fp8),
                 fsdp::Param("nf4", {3}, fsdp::DType::uint8, FSDP_PARAM_FROZEN)});
    model.seal();
    const bool gives = context.rank() == 1;
    using Codes = std::vector<fsdp::float8_e4m3>;
    group.load_plane("q", fsdp::Plane::row, gives ? Codes{{0x7e}, {0x38}} : Codes{}, 1);
    group.load_plane("q", fsdp::Plane::row_scale, std::vector<float>{0.5F});
    const std::vector<std::uint8_t> bytes{0, 255, 7};
    group.load_param("nf4", bytes);
    model.publish_weights();
    EXPECT_EQ(group.read_param<float>("q"), (std::vector<float>{224, 0.5F}));
    EXPECT_EQ(group.read_param<std::uint8_t>("nf4"), bytes);
    const fsdp::Weights weights = group.unshard(fsdp::Phase::forward);
    fsdp::span<const std::uint8_t> seen = weights["nf4"];
    EXPECT_EQ(std::vector<std::uint8_t>(seen.begin(), seen.end()), bytes);
  });
}

// In a matrix of 32 x 1 scales the first scale is at place 0, the second at place 16.
TEST(Training, ScalesAreSwizzled) {
  run_ranks(1, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Group group = model.create_group("only", {fsdp::Param("w", {32, 32}).quantize(fsdp::Quantization::mxfp8)});
    model.seal();
    std::vector<float> values(1024, 448);
    values[32] = 896;
    group.load_param("w", values);
    model.publish_weights();
    const fsdp::Weights weights = group.unshard(fsdp::Phase::forward);
    const auto scale = fsdp::Plane::row_scale;
    std::vector<std::uint8_t> bytes(group.swizzle_scales("w", fsdp::Phase::forward, scale), 9);
    ASSERT_EQ(bytes.size(), 512u);
    group.swizzle_scales("w", fsdp::Phase::forward, scale, bytes.data(), bytes.size());
    EXPECT_EQ(bytes[0], 127);
    EXPECT_EQ(bytes[1], 0);
    EXPECT_EQ(bytes[16], 128);
    EXPECT_EQ(status_of([&] { group.swizzle_scales("w", fsdp::Phase::forward, scale, bytes.data(), 511); }),
              fsdp::Status::invalid_argument);
  });
}

TEST(Training, GradientsArePutAddedUpAndLeftOut) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    for (const std::uint32_t last : {0u, static_cast<std::uint32_t>(FSDP_LAST)}) {
      net.first.put_grad("first.weight", ramp(12));
      net.first.put_no_grad("first.bias");
      net.first.reduce_grad(last);
      std::vector<fsdp::Grad> grads = net.second.acquire_grads(FSDP_GRAD_ZEROED);
      EXPECT_TRUE(grads[0].accumulate);
      for (float &g : grads[0].as<float>()) g += 1;
      net.second.reduce_grad(last);
    }
    net.model.finish_grads(0.5);
    for (const fsdp::Shard &shard : net.model.shards())
      for (std::size_t i = 0; i < shard.element_count(); ++i) {
        const float whole = static_cast<float>(shard.raw().element_offset + i + 1) * 0.5f;
        const float expected = shard.name() == "first.bias" ? 0 : shard.name() == "first.weight" ? whole : 1;
        EXPECT_EQ(shard.main_grad()[i], expected) << shard.name();
      }
    EXPECT_EQ(net.model.get_param_grad_norms()[1], 0);
    EXPECT_EQ(net.model.count_zero_grads(), net.model.info().element_count - 22);  // all of the bias
    const std::vector<double> weight_norms = net.model.get_param_weight_norms();
    const double squares = 0.25 * 12 * 13 * 25 / 6 + 10;  // of the ramp, and of ten ones
    EXPECT_NEAR(net.model.get_grad_norm(), std::sqrt(squares), 1e-12);
    EXPECT_EQ(net.model.clip_grads(1e9), net.model.get_last_norm());
    EXPECT_EQ(net.model.check_grads(), "");
    net.model.discard_step();
    EXPECT_EQ(net.model.get_param_weight_norms(), weight_norms);
    EXPECT_EQ(weight_norms.size(), net.model.info().param_count);
    context.close();
  });
}

TEST(Training, WholeGradientsAreReadAndReplaced) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    net.first.put_grad("first.weight", ramp(12));
    net.first.put_no_grad("first.bias");
    net.first.reduce_grad();
    net.model.finish_grads(2, nullptr, FSDP_LAST);  // the second group was given nothing
    const std::vector<float> found = net.first.read_grad<float>("first.weight");
    for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(found[i], 2 * ramp(12)[i]);
    EXPECT_EQ(net.first.read_grad<float>("first.weight", 1).empty(), context.rank() != 1);
    EXPECT_EQ(net.second.read_grad<float>(0), std::vector<float>(10));
    net.second.load_grad(0, context.rank() == 1 ? ramp(10) : std::vector<float>(), 1);
    EXPECT_EQ(net.second.read_grad<float>(0), ramp(10));
    net.model.step_adamw(0.125);
    expect_trained(net.second.read_param<float>(0), 10, 1, 0.125);
    EXPECT_EQ(status_of([&] { net.second.load_grad(0, ramp(10)); }), fsdp::Status::invalid_state);
    context.close();
  });
}

TEST(Training, BuffersThatPeersHaveYetToReadAreBusy) {
  std::atomic<bool> asked{false};
  run_ranks(2, [&](fsdp::Context &context) {
    fsdp::ModelOptions options;
    options.max_pending_groups = 1;
    TwoGroups net(context, options);
    while (context.rank() == 1 && !asked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    net.second.put_grad(0, ramp(10), nullptr, FSDP_GRAD_NO_WAIT);
    net.second.reduce_grad(FSDP_LAST);
    if (context.rank() == 0) {
      EXPECT_EQ(status_of([&] { net.first.acquire_grad(0, FSDP_GRAD_NO_WAIT); }), fsdp::Status::busy);
      EXPECT_EQ(status_of([&] { net.first.acquire_grads(FSDP_GRAD_NO_WAIT); }), fsdp::Status::busy);
      EXPECT_EQ(status_of([&] { net.first.put_grad(0, ramp(12), nullptr, FSDP_GRAD_NO_WAIT); }), fsdp::Status::busy);
      EXPECT_EQ(status_of([&] { net.first.put_no_grad(0, nullptr, FSDP_GRAD_NO_WAIT); }), fsdp::Status::busy);
    }
    asked = true;
    net.first.put_grad(0, ramp(12));
    net.first.put_no_grad(1);
    net.first.reduce_grad(FSDP_LAST);
    net.model.finish_grads();
    EXPECT_EQ(net.first.read_grad<float>(0), ramp(12));
    net.model.discard_step();
    context.close();
  });
}

TEST(Training, TheCallersOwnOptimizerWritesItsShards) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::ModelOptions options;
    options.optimizer = FSDP_OPTIMIZER_CALLER;
    fsdp::Model model(context, options);
    model.add_optimizer_state("momentum");
    fsdp::Group group = model.create_group("g", {fsdp::Param("w", {4, 2})});
    EXPECT_EQ(model.check(), "");
    model.seal();
    model.publish_weights();
    group.put_grad("w", ramp(8));
    group.reduce_grad(FSDP_LAST);
    model.finish_grads();
    for (const fsdp::Shard &shard : model.shards()) {
      const fsdp::span<float> momentum = shard.state("momentum");
      for (std::size_t i = 0; i < shard.element_count(); ++i)
        shard.main_weight()[i] -= 2 * (momentum[i] += shard.main_grad()[i]);
    }
    model.publish_weights();
    const std::vector<float> found = group.read_param<float>("w");
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(found[i], -2 * ramp(8)[i]);
    EXPECT_EQ(group.read_state<float>("w", "momentum"), ramp(8));
    EXPECT_EQ(group.read_state<float>("w", "momentum", 1).empty(), context.rank() != 1);
    context.close();
  });
}

// A matrix in bf16 that is all 1, in the update window.
struct Narrow {
  Narrow(fsdp::Context &context, const fsdp::ModelOptions &options) : model(context, options) {
    group = model.create_group("g", {fsdp::Param("w", {64, 64}, fsdp::DType::bfloat16)});
    model.seal();
    group.load_param("w", std::vector<float>(4096, 1.0f));
  }
  fsdp::Model model;
  fsdp::Group group;
};

TEST(Training, ShardsHaveMainWeightsInFewerBits) {
  run_ranks(1, [](fsdp::Context &context) {
    fsdp::ModelOptions options;
    options.main_storage = FSDP_MAIN_SPLIT16;
    const Narrow split(context, options);
    EXPECT_TRUE(split.model.shards()[0].main_weight().empty());
    options.main_storage = FSDP_MAIN_NONE;
    Narrow rounded(context, options);
    const fsdp::Shard shard = rounded.model.shards()[0];
    EXPECT_THROW((void)shard.main_weight(), fsdp::Error);
    EXPECT_EQ(shard.main_weight<fsdp::bfloat16>().size(), 4096u);
    const std::vector<float> numbers(4000, 1.001953125f);
    shard.round_stochastic({numbers.data(), numbers.size()}, 1, 96);
    EXPECT_THROW(shard.round_stochastic({numbers.data(), numbers.size()}, 1, 97), fsdp::Error);
    int raised = 0;
    for (const float x : rounded.group.read_param<float>("w")) raised += x > 1;
    EXPECT_TRUE(raised > 800 && raised < 1200) << raised;  // a quarter of them
    context.close();
  });
}

TEST(Training, StatesMayBeCodes) {
  run_ranks(1, [](fsdp::Context &context) {
    fsdp::ModelOptions options;
    options.optimizer = FSDP_OPTIMIZER_ADAMW_8BIT;
    Narrow net(context, options);
    net.model.publish_weights();
    net.model.apply_grads({std::vector<float>(4096, 0.5f)}, 0.125);
    const fsdp::Shard shard = net.model.shards()[0];
    EXPECT_EQ(fsdp::span<std::uint8_t>(shard.state("exp_avg"))[4095], 255);
    const fsdp::span<float> scales = shard.state("exp_avg.absmax");
    EXPECT_EQ(scales.size(), 16u);
    EXPECT_EQ(scales[15], 0.05f);
    EXPECT_EQ(net.group.read_state<float>("w", "exp_avg")[7], 0.05f);
    context.close();
  });
}

TEST(Training, OneCallStepsAsTheSingleCallsDo) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    const std::vector<float> weight = ramp(12), bias = ramp(4), second = ramp(10);
    const double norm = net.model.apply_grads({weight, bias, second}, 0.125);
    EXPECT_NEAR(norm, std::sqrt(0.25 * (12. * 13 * 25 + 4. * 5 * 9 + 10. * 11 * 21) / 6), 1e-12);
    expect_trained(net.first.read_param<float>(0), 12, 1, 0.125);
    context.close();
  });
}

TEST(Training, LoadsComeFromARootOrInRows) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Param frozen("frozen", {3}, fsdp::DType::bfloat16, FSDP_PARAM_FROZEN);
    fsdp::Group group = model.create_group("g", {fsdp::Param("w", {256, 2}), frozen});
    model.seal();
    group.load_param("frozen", std::array<float, 3>{1, 2, 3}, 1);
    const fsdp_chunk chunk = group.chunk("w", context.rank());
    const std::vector<float> rows(static_cast<std::size_t>(chunk.element_count),
                                  static_cast<float>(context.rank() + 1));
    group.load_chunk("w", rows, chunk.row_offset);
    EXPECT_EQ(status_of([&] { group.load_chunk("w", std::vector<float>(3), 0); }), fsdp::Status::invalid_argument);
    model.publish_weights();
    const std::vector<float> found = group.read_param<float>("w");
    EXPECT_EQ(found.front(), 1);
    EXPECT_EQ(found.back(), 2);
    fsdp::Weights weights = group.unshard(fsdp::Phase::eval);
    EXPECT_EQ(weights.get<fsdp::bfloat16>("frozen")[1].bits, 0x4000);
    EXPECT_FALSE(group.acquire_grads()[1].tensor);
    weights.reshard();
    model.discard_step();
    context.close();
  });
}

TEST(Training, WhatWasSavedIsLoaded) {
  const std::string folder = ::testing::TempDir() + "fsdp_hpp_" + std::to_string(::getpid());
  run_ranks(2, [&](fsdp::Context &context) {
    TwoGroups net(context);
    net.step(0.5);
    net.model.save(folder);
    const std::vector<float> saved = net.first.read_param<float>(0);
    fsdp::Checkpoint save = fsdp::Checkpoint::begin(context, folder);
    save.add_model("net", net.model);
    save.add_bytes("place", "epoch 3", 7);
    EXPECT_EQ(status_of([&] { save.commit(); }), fsdp::Status::invalid_state);  // the folder has this step
    net.step(0.5);
    save = fsdp::Checkpoint::begin(context, folder);
    save.add_model("net", net.model);
    save.add_bytes("place", "epoch 3", 7);
    save.commit();
    save.wait();
    EXPECT_EQ(save.state(), fsdp::CheckpointState::committed);
    const std::vector<float> later = net.first.read_param<float>(0);
    net.model.begin_update();
    EXPECT_EQ(net.model.load(folder + "/step-0000000001").step, 1u);
    net.model.publish_weights();
    EXPECT_EQ(net.first.read_param<float>(0), saved);
    fsdp::Checkpoint opened = fsdp::Checkpoint::open(context, folder);
    const std::vector<unsigned char> bytes = opened.read_bytes("place");
    EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "epoch 3");
    net.model.begin_update();
    const fsdp::Loaded loaded = opened.load_model("net", net.model);
    EXPECT_EQ(loaded.step, 2u);
    EXPECT_GT(loaded.loaded_tensors, 0u);
    EXPECT_EQ(loaded.missing_tensors + loaded.unexpected_tensors, 0u);
    EXPECT_NE(net.model.describe_load().find("\"missing\":[]"), std::string::npos);
    net.model.publish_weights();
    EXPECT_EQ(net.first.read_param<float>(0), later);
    context.close();
  });
  EXPECT_NE(fsdp::list_checkpoints(folder).find("step-0000000002"), std::string::npos);
  std::filesystem::remove_all(folder);
}

TEST(Training, APlanAnswersWithoutMemory) {
  fsdp::ContextOptions options;
  options.device = FSDP_DEVICE_CUDA;
  fsdp::Context context = fsdp::Context::plan(8, 3, options);
  fsdp::Model model(context);
  fsdp::Group group = model.create_group("g", {fsdp::Param("w", {64, 2}).global({128, 2}, {64, 0})});
  fsdp::Group experts = model.create_group("e", {fsdp::Param("experts", {2, 32, 8}).rows_in(2)});
  model.set_schedule(fsdp::ScheduleKind::visits,
                     {{0, FSDP_FORWARD}, {1, FSDP_FORWARD}, {1, FSDP_BACKWARD}, {0, FSDP_BACKWARD}});
  model.seal();
  EXPECT_EQ(group.chunk("w", 3).row_offset, 24u);
  EXPECT_EQ(experts.chunk("experts", 3).row_count, 8u);
  EXPECT_EQ(experts.param_info("experts").row_dimensions, 2u);
  EXPECT_EQ(group.param_info("w").global_shape[0], 128u);
  EXPECT_EQ(model.info().element_count, 128u + 512);
  EXPECT_EQ(model.role_bytes(fsdp::Role::optimizer, 3) % 4, 0u);
  EXPECT_NE(model.describe().find("\"w\""), std::string::npos);
  EXPECT_EQ(status_of([&] { group.read_param<float>("w"); }), fsdp::Status::invalid_state);
}

TEST(Training, TheCallerAndAdamWUpdateParametersOfTheirOwn) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Param matrix("w", {4, 8});
    fsdp::Group group =
        model.create_group("layer", {matrix.updated_by(fsdp::Optimizer::caller), fsdp::Param("b", {4})});
    model.add_optimizer_state("momentum");
    model.seal();
    model.publish_weights();
    group.put_grad("w", std::vector<float>(32, 1));
    group.put_grad("b", std::vector<float>(4, 1));
    group.reduce_grad(FSDP_LAST);
    model.finish_grads();
    for (const fsdp::Shard &shard : model.shards()) {
      const bool own = shard.name() == "w";
      EXPECT_EQ(status_of([&] { shard.state(own ? "exp_avg" : "momentum"); }), fsdp::Status::invalid_argument);
      if (!own) continue;
      const fsdp::span<float> momentum = shard.state("momentum");
      for (std::size_t i = 0; i < momentum.size(); ++i) {
        momentum[i] = 0.5f * momentum[i] + shard.main_grad()[i];
        shard.main_weight()[i] -= 0.25f * momentum[i];
      }
    }
    model.step_adamw(0.5);
    EXPECT_EQ(group.read_param<float>("w"), std::vector<float>(32, -0.25f));
    EXPECT_EQ(group.read_state<float>("w", "momentum"), std::vector<float>(32, 1));
    for (const float x : group.read_param<float>("b")) EXPECT_NEAR(x, -0.5f, 1e-5f);
    context.close();
  });
}

}  // namespace
