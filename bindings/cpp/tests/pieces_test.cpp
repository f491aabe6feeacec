// SPDX-License-Identifier: Apache-2.0
// Pieces of a group: guards of their own, and visits.
#include "ranks.h"

namespace {

// Three matrices in the pieces 0, 1 and 1 of each of two groups, of which "b" is not read in BACKWARD.
struct Net {
  explicit Net(const fsdp::Context &context, fsdp::ScheduleKind kind, std::uint32_t held_groups = 0)
      : model(context, options()) {
    for (const char *name : {"a", "b"}) {
      fsdp::GroupOptions group_options;
      if (*name == 'b') group_options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
      std::vector<fsdp::Param> params;
      for (std::uint32_t p = 0; p < 3; ++p)
        params.push_back(fsdp::Param(std::string(name) + std::to_string(p), {4, 2}).in_piece((p + 1) / 2));
      groups.push_back(model.create_group(name, params, group_options));
    }
    const bool visits = kind == fsdp::ScheduleKind::visits;
    model.set_schedule(kind, visits ? visits_of_pieces() : std::vector<fsdp::Visit>{}, held_groups);
    model.seal();
    for (std::size_t g = 0; g < 2; ++g)
      for (std::size_t p = 0; p < 3; ++p) groups[g].load_param(p, weights_of(g, p));
    model.publish_weights();
  }
  static fsdp::ModelOptions options() {
    fsdp::ModelOptions options;
    options.unshard_mode = FSDP_UNSHARD_COPIED;
    options.flags = FSDP_MODEL_NO_PREFETCH;
    return options;
  }
  static std::vector<fsdp::Visit> visits_of_pieces() {
    using fsdp::Phase;
    return {{0, Phase::forward, 0},  {0, Phase::forward, 1},  {1, Phase::forward, 0}, {1, Phase::forward, 1},
            {1, Phase::backward, 1}, {1, Phase::backward, 0}, {0, Phase::backward},   {0, Phase::backward, 0}};
  }
  static std::vector<float> weights_of(std::size_t g, std::size_t p) {
    return std::vector<float>(8, static_cast<float>(3 * g + p + 1));
  }
  // Every gradient is the weight as the forward pass sees it.
  void step(bool by_piece) {
    for (fsdp::Group &group : groups) {
      if (by_piece)
        for (const std::uint32_t piece : {0u, 1u}) put_grads(group, group.unshard_piece(piece, fsdp::Phase::forward));
      else
        put_grads(group, group.unshard(fsdp::Phase::forward));
    }
    for (const std::size_t g : {1u, 0u}) groups[g].reduce_grad(FSDP_LAST);
    model.finish_grads();
    model.step_adamw(0.125);
  }
  static void put_grads(fsdp::Group &group, const fsdp::Weights &weights) {
    for (std::size_t p = weights.first(); p < weights.first() + weights.size(); ++p) {
      const fsdp::span<const float> w = weights[p];
      group.put_grad(p, std::vector<float>(w.begin(), w.end()));
    }
  }

  fsdp::Model model;
  std::vector<fsdp::Group> groups;
};

TEST(Pieces, AGuardShowsTheParametersOfItsPieceOnly) {
  for (const auto kind : {fsdp::ScheduleKind::sequential, fsdp::ScheduleKind::visits, fsdp::ScheduleKind::any})
    run_ranks(2, [&](fsdp::Context &context) {
      Net net(context, kind, kind == fsdp::ScheduleKind::any ? 2 : 0);
      fsdp::Group &group = net.groups[0];
      for (int turn = 0; turn < 2; ++turn) {
        fsdp::Weights weights = group.unshard_piece(1, fsdp::Phase::forward);
        EXPECT_EQ(weights.first(), 1u);
        EXPECT_EQ(weights.size(), 2u);
        for (const std::size_t p : {1u, 2u}) {
          const fsdp::span<const float> w = weights[p];
          EXPECT_EQ(std::vector<float>(w.begin(), w.end()), Net::weights_of(0, p));
        }
        EXPECT_EQ(weights["a2"].data(), weights[2].data());
        EXPECT_EQ(status_of([&] { weights["a0"]; }), fsdp::Status::invalid_state);
        EXPECT_EQ(status_of([&] { weights[3]; }), fsdp::Status::invalid_argument);
        try {
          weights[0];
        } catch (const fsdp::Error &error) {
          EXPECT_NE(std::string(error.message()).find("a0 is in piece 0 of group a"), std::string::npos);
          EXPECT_NE(std::string(error.message()).find("these weights are of piece 1"), std::string::npos);
        }
        const fsdp::Weights moved = std::move(weights);
        EXPECT_EQ(moved.size(), 2u);
        EXPECT_EQ(weights.size(), 0u);
      }
      EXPECT_EQ(net.model.stats().gathered_groups, kind == fsdp::ScheduleKind::any ? 1u : 0u);
      EXPECT_EQ(net.groups[0].param_info(2).piece, 1u);
      context.close();
    });
}

TEST(Pieces, AreGatheredByThemselvesAndTheGroupGathersTheRest) {
  run_ranks(2, [](fsdp::Context &context) {
    Net net(context, fsdp::ScheduleKind::sequential);
    auto gathered = [&, before = std::uint64_t{0}]() mutable {
      return net.model.stats().gathers - std::exchange(before, net.model.stats().gathers);
    };
    gathered();
    fsdp::Weights first = net.groups[0].unshard_piece(0, fsdp::Phase::forward);
    EXPECT_EQ(gathered(), 1u);
    {
      fsdp::Weights all = net.groups[0].unshard(fsdp::Phase::forward);
      EXPECT_EQ(gathered(), 1u);
      fsdp::Weights again = net.groups[0].unshard_piece(1, fsdp::Phase::forward);
      EXPECT_EQ(gathered(), 0u);
      EXPECT_EQ(all[2].data(), again[2].data());
    }
    first.reshard();
    EXPECT_EQ(net.model.stats().gathered_groups, 0u);
    net.groups[0].unshard(fsdp::Phase::forward).reshard();
    EXPECT_EQ(gathered(), 2u);
    EXPECT_EQ(status_of([&] { (void)net.groups[0].unshard_piece(2, fsdp::Phase::forward); }),
              fsdp::Status::invalid_argument);
    context.close();
  });
}

TEST(Pieces, TrainTheBitsOfWholeGroups) {
  std::vector<std::vector<float>> whole;
  for (const bool by_piece : {false, true})
    run_ranks(2, [&](fsdp::Context &context) {
      Net net(context, by_piece ? fsdp::ScheduleKind::visits : fsdp::ScheduleKind::sequential);
      for (int step = 0; step < 4; ++step) net.step(by_piece);
      std::vector<std::vector<float>> found;
      for (const fsdp::Group &group : net.groups)
        for (std::size_t p = 0; p < 3; ++p) found.push_back(group.read_param<float>(p));
      if (!by_piece && context.rank() == 0) whole = found;
      if (by_piece) {
        EXPECT_EQ(found, whole);
      }
      EXPECT_EQ(status_of([&] { (void)net.groups[1].unshard(fsdp::Phase::backward); }), fsdp::Status::invalid_state);
      EXPECT_EQ(status_of([&] { (void)net.groups[1].unshard_piece(0, fsdp::Phase::backward); }),
                fsdp::Status::invalid_state);
      context.close();
    });
  EXPECT_NE(whole[0], Net::weights_of(0, 0));
}

TEST(Pieces, OfQuantizedParametersHavePlanes) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Param quantized("q", {1, 2});
    quantized.quantize(fsdp::Quantization::fp8_block).in_piece(1);
    fsdp::Group group = model.create_group("g", {fsdp::Param("w", {4}), quantized});
    model.seal();
    group.load_param("q", std::vector<float>{448, 1});
    model.publish_weights();
    const fsdp::Weights weights = group.unshard_piece(1, fsdp::Phase::forward);
    EXPECT_FALSE(weights["q"]);
    EXPECT_EQ(weights["q"].shape()[1], 2u);
    EXPECT_EQ(weights["q"].element_count(), 2u);
    EXPECT_EQ(weights["q"].dtype(), fsdp::DType::float32);
    EXPECT_EQ(status_of([&] { weights["q"].as<const float>(); }), fsdp::Status::invalid_state);
    fsdp::span<const fsdp::float8_e4m3> codes = group.get_plane("q", fsdp::Phase::forward, fsdp::Plane::row);
    EXPECT_EQ(codes[0].bits, 0x7e);
  });
}

// A visit counts pieces from 0, as everything else does.
TEST(Pieces, ThatDoNotExistAreRefusedInVisits) {
  run_ranks(1, [](fsdp::Context &context) {
    for (const std::uint32_t piece : {1u, UINT32_MAX}) {
      fsdp::Model model(context);
      model.create_group("g", {fsdp::Param("w", {4})});
      const std::vector<fsdp::Visit> visits = {{0, FSDP_FORWARD, piece}, {0, FSDP_BACKWARD}};
      model.set_schedule(fsdp::ScheduleKind::visits, visits);
      EXPECT_EQ(status_of([&] { model.seal(); }), fsdp::Status::invalid_argument);
    }
  });
}

}  // namespace
