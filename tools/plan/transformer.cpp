// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <stdexcept>

#include "plan/job_spec.h"

namespace plan {
namespace {

ParamSpec matrix(std::string name, uint64_t rows, uint64_t columns) { return {std::move(name), {rows, columns}}; }

ParamSpec norm(std::string name, uint64_t width) {
  ParamSpec param{std::move(name), {width}};
  param.flags = FSDP_PARAM_NO_DECAY;
  return param;
}

GroupSpec build_layer(const TransformerShape &shape, uint64_t index) {
  const uint64_t kv_width = shape.width / shape.heads * shape.kv_heads;
  const auto name = fmt::format("layer.{}", index);
  GroupSpec group;
  group.name = name;
  group.params.push_back(norm(name + ".attention_norm", shape.width));
  group.params.push_back(matrix(name + ".query", shape.width, shape.width));
  group.params.push_back(matrix(name + ".key", kv_width, shape.width));
  group.params.push_back(matrix(name + ".value", kv_width, shape.width));
  group.params.push_back(matrix(name + ".output", shape.width, shape.width));
  const size_t attention = group.params.size();
  group.params.push_back(norm(name + ".ffn_norm", shape.width));
  if (shape.gated) group.params.push_back(matrix(name + ".gate", shape.ffn, shape.width));
  group.params.push_back(matrix(name + ".up", shape.ffn, shape.width));
  group.params.push_back(matrix(name + ".down", shape.width, shape.ffn));
  for (size_t p = attention; shape.by_piece && p < group.params.size(); ++p) group.params[p].piece = 1;
  for (ParamSpec &param : group.params)
    if (param.shape.size() == 2) {
      param.quantization = shape.quantization;
      if (shape.muon) param.matrix = FSDP_MATRIX_LAST_TWO, param.optimizer = FSDP_OPTIMIZER_CALLER;
    }
  return group;
}

void check_shape(const TransformerShape &shape) {
  if (shape.width % shape.heads != 0)
    throw std::invalid_argument(fmt::format("--width {} is not a multiple of --heads {}", shape.width, shape.heads));
  if (shape.heads % shape.kv_heads != 0)
    throw std::invalid_argument(
        fmt::format("--heads {} is not a multiple of --kv-heads {}", shape.heads, shape.kv_heads));
}

}  // namespace

ModelSpec build_transformer(const TransformerShape &given) {
  auto shape = given;
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  if (shape.ffn == 0) shape.ffn = 4 * shape.width;
  check_shape(shape);

  ModelSpec model;
  model.name = fmt::format("transformer, {} layers of width {}", shape.layers, shape.width);
  GroupSpec embedding, head;
  embedding.name = "embedding";
  embedding.params.push_back(matrix("embedding", shape.vocab, shape.width));
  head.name = "head";
  head.params.push_back(norm("head.norm", shape.width));
  if (!shape.tied) head.params.push_back(matrix("head.weight", shape.vocab, shape.width));

  model.groups.push_back(std::move(embedding));
  for (uint64_t i = 0; i < shape.layers; ++i) model.groups.push_back(build_layer(shape, i));
  model.groups.push_back(std::move(head));
  return model;
}

}  // namespace plan
