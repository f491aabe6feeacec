// SPDX-License-Identifier: Apache-2.0
// The same training by one process without the library.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "element.h"
#include "harness.h"

namespace harness {
namespace {

fsdp_dtype first_of(fsdp_dtype a, fsdp_dtype b, fsdp_dtype c) { return a ? a : b ? b : c; }

// What one parameter's training needs, element by element.
struct ReferenceParam {
  const Scenario &setup;
  const GroupDef &group;
  const ParamDef &param;
  uint32_t ordinal;
  std::vector<float> weight, m, v, grad;

  fsdp_dtype grad_dtype() const { return first_of(group.options.grad_dtype, setup.model.grad_dtype, param.dtype); }
  fsdp_dtype wire_dtype() const { return first_of(group.options.reduce_dtype, setup.model.reduce_dtype, grad_dtype()); }
  bool last_only() const {
    const fsdp_strategy strategy = group.options.strategy ? group.options.strategy : setup.model.strategy;
    if (strategy == FSDP_OPTIM) return true;
    if (setup.model.reduce_policy) return setup.model.reduce_policy == FSDP_REDUCE_LAST;
    return strategy == FSDP_NO_SHARD;
  }
  uint32_t replicas() const { return std::max(setup.mesh.replicate_size, 1u); }
  // Ranks that are summed before others: a replica's, a host's, or what the mesh declares.
  uint32_t block() const {
    const uint32_t shard = setup.ranks / replicas();
    const uint32_t declared =
        setup.mesh.reduction_block_size ? setup.mesh.reduction_block_size : setup.context.ranks_per_host;
    return replicas() == 1 && declared ? std::min(declared, shard) : shard;
  }
  // The scaled sum of one block's ranks.
  float sum_block(const std::vector<float> &values, uint32_t first) const {
    float sum = round_to(values[first], wire_dtype());
    for (uint32_t r = first + 1; r < first + block(); ++r) sum += round_to(values[r], wire_dtype());
    const float factor = setup.model.grad_op == FSDP_GRAD_SUM      ? 1.0f
                         : setup.model.grad_op == FSDP_GRAD_FACTOR ? static_cast<float>(setup.model.grad_factor)
                                                                   : static_cast<float>(1.0 / setup.ranks);
    return factor == 1.0f ? sum : sum * factor;
  }
  // Adds the ranks' values of one contribution: replicas each to a total of its own, blocks of one replica one by one.
  void contribute(std::vector<float> &totals, const std::vector<float> &values, bool first) const {
    for (uint32_t b = 0; b < setup.ranks / block(); ++b) {
      float &total = totals[replicas() > 1 ? b : 0];
      const bool sets = first && (b == 0 || replicas() > 1);
      total = sets ? sum_block(values, b * block()) : total + sum_block(values, b * block());
    }
  }
  void differentiate(uint32_t step) {
    for (uint64_t i = 0; i < weight.size(); ++i) {
      const float seen = round_to(weight[i], param.dtype);
      std::vector<float> local(setup.ranks), totals(replicas());
      for (uint32_t k = 0; k < setup.microbatches; ++k) {
        for (uint32_t r = 0; r < setup.ranks; ++r) {
          const float g = gradient(r, step, k, ordinal, i, seen);
          local[r] = round_to(k && last_only() ? local[r] + g : g, grad_dtype());
        }
        if (!last_only()) contribute(totals, local, k == 0);
      }
      if (last_only()) contribute(totals, local, true);
      grad[i] = std::accumulate(totals.begin() + 1, totals.end(), totals[0], std::plus<float>());
      if (static_cast<float>(setup.scale) != 1.0f) grad[i] *= static_cast<float>(setup.scale);
    }
  }
  double squares() const {
    return std::accumulate(grad.begin(), grad.end(), 0.0, [](double sum, float g) { return sum + double(g) * g; });
  }
  // In double from fp32 state: an independent calculation, close but not equal in bits.
  void adamw(uint32_t step, double factor) {
    const double c1 = 1 - std::pow(0.9, step + 1), c2 = 1 - std::pow(0.999, step + 1);
    const double lr = 0.01 * (param.lr_scale != 0 ? param.lr_scale : 1);
    const double decay = param.flags & FSDP_PARAM_NO_DECAY ? 0 : setup.weight_decay;
    for (uint64_t i = 0; i < weight.size(); ++i) {
      const double g = static_cast<float>(grad[i] * static_cast<float>(factor));
      m[i] = static_cast<float>(0.9 * m[i] + 0.1 * g);
      v[i] = static_cast<float>(0.999 * v[i] + 0.001 * g * g);
      weight[i] =
          static_cast<float>(weight[i] - lr * decay * weight[i] - lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + 1e-8));
    }
  }
};

}  // namespace

Outcome reference(const Scenario &setup) {
  std::vector<ReferenceParam> params;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      ReferenceParam p{setup, group, param, static_cast<uint32_t>(params.size()), {}, {}, {}, {}};
      for (uint64_t i = 0; i < param.count(); ++i) p.weight.push_back(initial_weight(p.ordinal, i));
      p.m.assign(p.weight.size(), 0);
      p.v.assign(p.weight.size(), 0);
      p.grad.assign(p.weight.size(), 0);
      params.push_back(std::move(p));
    }
  Outcome outcome;
  for (uint32_t step = 0; step < setup.steps; ++step) {
    double squares = 0;
    for (auto &p : params)
      if (!(p.param.flags & FSDP_PARAM_FROZEN)) {
        p.differentiate(step);
        squares += p.squares();
      }
    const double norm = std::sqrt(squares);
    outcome.norms.push_back(norm);
    const double factor = setup.clip > 0 && norm > setup.clip ? setup.clip / norm : 1;
    for (auto &p : params)
      if (!(p.param.flags & FSDP_PARAM_FROZEN)) p.adamw(step, factor);
  }
  for (auto &p : params) {
    outcome.weights.push_back(p.weight);
    outcome.grads.push_back(p.grad);
  }
  return outcome;
}

bool same_bits(const std::vector<std::vector<float>> &a, const std::vector<std::vector<float>> &b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].size() != b[i].size() ||
        (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float))))
      return false;
  return true;
}

double relative_l2(const std::vector<float> &a, const std::vector<float> &b) {
  double difference = 0, total = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    total += double(b[i]) * b[i];
  }
  return std::sqrt(difference / std::max(total, 1e-30));
}

}  // namespace harness
