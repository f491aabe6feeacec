// SPDX-License-Identifier: Apache-2.0
// The tiny GPT, its first weights and its text: examples/README.md describes it. Nothing here knows of libfsdp.
#ifndef GPT_HPP
#define GPT_HPP

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sharded.hpp"

namespace gpt {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr std::int64_t layers = 2, width = 64, heads = 2, context = 32, vocabulary = 256, batch = 4;
constexpr int steps = 5;
constexpr double learning_rate = 1e-3, weight_decay = 0.1;
constexpr unsigned char text[] =
    "Each rank of a sharded job keeps a part of every weight, of every gradient and of the state of the optimizer. "
    "Before a layer is used its weights are gathered, and after it they are given back. What the ranks' gradients "
    "add up to goes to the one that keeps the part. So all ranks together need the memory of one copy.";

inline nn::Linear make_linear(std::int64_t in, std::int64_t out, bool has_bias) {
  return nn::Linear(nn::LinearOptions(in, out).bias(has_bias));
}
inline nn::LayerNorm make_norm() { return nn::LayerNorm(nn::LayerNormOptions({width}).eps(1e-5)); }

struct Embedding : Part {
  nn::Embedding tokens = register_module("tokens", nn::Embedding(vocabulary, width));
  nn::Embedding places = register_module("places", nn::Embedding(context, width));
  torch::Tensor forward(torch::Tensor x) override { return tokens(x) + places->weight; }
};

struct Block : Part {
  nn::LayerNorm norm1 = register_module("norm1", make_norm());
  nn::Linear qkv = register_module("qkv", make_linear(width, 3 * width, false));
  nn::Linear proj = register_module("proj", make_linear(width, width, false));
  nn::LayerNorm norm2 = register_module("norm2", make_norm());
  nn::Linear up = register_module("up", make_linear(width, 4 * width, true));
  nn::Linear down = register_module("down", make_linear(4 * width, width, true));

  torch::Tensor forward(torch::Tensor x) override {
    std::vector<torch::Tensor> parts = qkv(norm1(x)).split(width, -1);
    for (torch::Tensor &part : parts) part = part.unflatten(-1, {heads, -1}).transpose(1, 2);
    const torch::Tensor mixed =
        torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + proj(mixed.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x)), "tanh"));
  }
};

struct Head : Part {
  nn::LayerNorm norm = register_module("norm", make_norm());
  nn::Linear head = register_module("head", make_linear(width, vocabulary, false));
  torch::Tensor forward(torch::Tensor x) override { return head(norm(x)); }
};

/** The first weights of parameter `number`: integers of 32 bits, then a division by a power of two. */
inline torch::Tensor make_weight(std::uint32_t number, bool is_gain, torch::IntArrayRef shape) {
  torch::Tensor made = torch::empty(shape);
  float *values = made.data_ptr<float>();
  for (std::uint32_t i = 0; i < made.numel(); ++i) {
    std::uint32_t bits = i * 2654435761U + 40503U * number + 1;
    bits ^= bits >> 16;
    bits *= 2246822519U;
    bits ^= bits >> 13;
    values[i] = (static_cast<float>(bits & 0xffff) - 32768) / (1 << 19) + (is_gain ? 1 : 0);
  }
  return made;
}

/** The network: parts in a row, with their first weights. */
inline std::vector<std::shared_ptr<Part>> make_parts() {
  std::vector<std::shared_ptr<Part>> parts{std::make_shared<Embedding>()};
  for (int layer = 0; layer < layers; ++layer) parts.push_back(std::make_shared<Block>());
  parts.push_back(std::make_shared<Head>());
  std::uint32_t number = 0;
  for (const auto &part : parts)
    for (const auto &item : part->named_parameters()) {
      const std::string &name = item.key();
      const bool is_gain = name.find("norm") != std::string::npos && name.find("weight") != std::string::npos;
      item.value().set_data(make_weight(number++, is_gain, item.value().sizes()));
    }
  return parts;
}

/** A rank's sequences of a step, and what follows each byte of them. */
inline std::pair<torch::Tensor, torch::Tensor> read_batch(int step, std::int64_t rank = 0,
                                                          std::int64_t world_size = 1) {
  const std::int64_t size = batch / world_size;
  const torch::Tensor bytes = torch::tensor(std::vector<std::int64_t>(std::begin(text), std::end(text)));
  std::vector<torch::Tensor> rows, targets;
  for (std::int64_t b = 0; b < size; ++b) {
    const std::int64_t start = 11 * (step * batch + rank * size + b);
    rows.push_back(bytes.slice(0, start, start + context));
    targets.push_back(bytes.slice(0, start + 1, start + 1 + context));
  }
  return {torch::stack(rows), torch::stack(targets)};
}

inline torch::Tensor loss_of(const torch::Tensor &logits, const torch::Tensor &targets) {
  return F::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

}  // namespace gpt

#endif
