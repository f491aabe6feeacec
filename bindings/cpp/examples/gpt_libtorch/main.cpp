// SPDX-License-Identifier: Apache-2.0
// A tiny GPT of libtorch's modules, sharded, beside the same modules with libtorch's own AdamW.
//
//     fsdp-run -n 2 --no-prefix gpt_libtorch
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "gpt.hpp"
#include "sharded.hpp"

namespace {

using Losses = std::vector<double>;

std::pair<Losses, std::vector<torch::Tensor>> train_alone() {
  const auto parts = gpt::make_parts();
  std::vector<torch::Tensor> params;
  for (const auto &part : parts)
    for (const torch::Tensor &param : part->parameters()) params.push_back(param);
  torch::optim::AdamW optimizer(params, torch::optim::AdamWOptions(gpt::learning_rate).weight_decay(gpt::weight_decay));
  Losses losses;
  for (int step = 0; step < gpt::steps; ++step) {
    auto [x, targets] = gpt::read_batch(step);
    for (const auto &part : parts) x = part->forward(x);
    const torch::Tensor loss = gpt::loss_of(x, targets);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return {losses, params};
}

Losses train_sharded(fsdp::Context &context, Sharded &network) {
  fsdp::AdamwOptions options;
  options.weight_decay = gpt::weight_decay;
  Losses losses;
  for (int step = 0; step < gpt::steps; ++step) {
    const auto [tokens, targets] = gpt::read_batch(step, context.rank(), context.world_size());
    const torch::Tensor loss = gpt::loss_of(network.forward(tokens), targets);
    loss.backward();
    network.step_adamw(gpt::learning_rate, options);
    losses.push_back(context.all_reduce_value(loss.item<double>(), fsdp::ValueOp::mean));
  }
  return losses;
}

double find_largest_difference(const Sharded &network, const std::vector<torch::Tensor> &others) {
  double largest = 0;
  std::size_t next = 0;
  for (const auto &layer : network.layers())
    for (std::size_t i = 0; i < layer->params().size(); ++i)
      largest = std::max(largest, (layer->read(i) - others[next++].detach()).abs().max().item<double>());
  return largest;
}

void print_rank(const fsdp::Model &model, std::uint32_t rank) {
  std::uint64_t state = 0;
  for (const auto role : {fsdp::Role::compute, fsdp::Role::main, fsdp::Role::grad, fsdp::Role::optimizer})
    state += model.role_bytes(role, rank);
  const std::uint64_t one_copy = 16 * model.info().element_count;  // weight, gradient and two states, fp32
  std::printf("rank %u: state %llu bytes of %llu, %llu in all\n", rank, static_cast<unsigned long long>(state),
              static_cast<unsigned long long>(one_copy),
              static_cast<unsigned long long>(model.role_bytes(fsdp::Role::all, rank)));
}

/** Whether the sharded run is the one of libtorch alone. */
bool are_equal(const Losses &losses, const Losses &alone, double weights_differ) {
  bool are = std::fabs(losses[0] - alone[0]) <= 1e-5 && weights_differ <= 1e-4;
  for (std::size_t i = 0; i < losses.size(); ++i) are = are && std::fabs(losses[i] - alone[i]) <= 1e-4;
  return are;
}

}  // namespace

int main() try {
  torch::set_num_threads(1);
  const auto [alone, weights_alone] = train_alone();
  fsdp::Context context;  // rank and world size from fsdp-run
  Sharded network(context, gpt::make_parts());
  const Losses losses = train_sharded(context, network);
  const double weights_differ = find_largest_difference(network, weights_alone);
  if (context.rank() == 0) {
    std::printf("libtorch %s, %u ranks\n", TORCH_VERSION, context.world_size());
    for (std::size_t i = 0; i < losses.size(); ++i)
      std::printf("step %zu: loss %.7f, alone %.7f\n", i + 1, losses[i], alone[i]);
    std::printf("weights differ by at most %.1e\n", weights_differ);
    for (std::uint32_t rank = 0; rank < context.world_size(); ++rank) print_rank(network.model(), rank);
  }
  context.close();
  if (are_equal(losses, alone, weights_differ)) return 0;
  std::fprintf(stderr, "the sharded run is not the one of libtorch alone\n");
  return 1;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
