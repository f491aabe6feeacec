// SPDX-License-Identifier: Apache-2.0
// A group with a mesh of its own: each of two ranks has experts that it shares with no other rank.
#include "ranks.h"

namespace {

/** Dense weights of both ranks, and this rank's half of a stack; both with gradients. */
struct Experts {
  Experts(const fsdp::Context &context, fsdp::GroupOptions options) : model(context) {
    dense = model.create_group("dense", {fsdp::Param("dense", {4})});
    fsdp::Param half("experts", {1, 4});
    half.global({2, 4}, {context.rank(), 0});
    const std::uint32_t own = context.rank();
    fsdp::MeshOptions mesh_options;
    mesh_options.ranks = &own;
    mesh_options.rank_count = 1;
    const fsdp::Mesh mesh(context, mesh_options);
    options.mesh = mesh.get();
    experts = model.create_group("experts", {half}, options);
    model.seal();
    model.publish_weights();
  }

  double norm_of(float value) {
    const std::vector<float> grad(4, value);
    for (fsdp::Group group : {dense, experts}) {
      group.put_grad(0, grad);
      group.reduce_grad(FSDP_LAST);
    }
    model.finish_grads();
    return model.get_grad_norm();
  }

  fsdp::Model model;
  fsdp::Group dense, experts;
};

TEST(GroupMesh, MeanIsOverTheRanksOfTheModel) {
  run_ranks(2, [](fsdp::Context &context) {
    Experts net(context, {});
    const auto value = static_cast<float>(2 * context.rank() + 2);
    EXPECT_EQ(net.norm_of(value), std::sqrt(4.0 * 9 + 4 * 1 + 4 * 4));
    EXPECT_EQ(net.experts.read_grad<float>(0), std::vector<float>(4, value / 2));
    const fsdp_group_info info = net.experts.info();
    EXPECT_EQ(info.replicate_size, 1u);
    EXPECT_EQ(info.shard_size, 1u);
    EXPECT_EQ(info.grad_op, FSDP_GRAD_OP_MEAN);
    EXPECT_EQ(info.outer_strategy, FSDP_OUTER_NO_SHARD);
    EXPECT_EQ(info.grad_factor, 0.5);
    context.close();
  });
}

TEST(GroupMesh, GroupHasAFactorOfItsOwn) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::GroupOptions options;
    options.grad_op = FSDP_GRAD_OP_FACTOR;
    options.grad_factor = 0.75;
    Experts net(context, options);
    EXPECT_EQ(net.norm_of(2), std::sqrt(4 * 4 + 8 * 1.5 * 1.5));
    EXPECT_EQ(net.dense.info().grad_factor, 0.5);
    EXPECT_EQ(net.experts.info().grad_factor, 0.75);
    context.close();
  });
}

}  // namespace
