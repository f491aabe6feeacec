// SPDX-License-Identifier: Apache-2.0
// The same training by one process without the library.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "compact_reference.h"
#include "element.h"
#include "harness.h"

namespace harness {
namespace {

fsdp_dtype first_of(fsdp_dtype a, fsdp_dtype b, fsdp_dtype c) { return a ? a : b ? b : c; }

// The compute weights that belong to these main weights.
std::vector<float> seen_of(const Scenario &setup, const GroupDef &group, const ParamDef &param,
                           std::vector<float> values, bool backward) {
  const fsdp_model_options &model = setup.model;
  const BlockShape block = block_of(param.quantization, backward);
  if (param.quantization == FSDP_QUANTIZE_MXFP8)
    return dequantize(quantize_mxfp8(values, param.shape, backward, model.scale_rule, model.quantize_from), param.shape,
                      block);
  if (param.quantization)
    return dequantize(quantize_blocks(values, param.shape, model.scale_rounding, model.quantize_from,
                                      param.quantization == FSDP_QUANTIZE_FP8),
                      param.shape, block);
  const bool is_split = storage_of(setup, group, param) == FSDP_MAIN_SPLIT16;
  for (float &value : values) value = is_split ? upper_half(value) : round_to(value, param.dtype);
  return values;
}

// The training state of one parameter, element by element.
struct ReferenceParam {
  const Scenario &setup;
  const GroupDef &group;
  const ParamDef &param;
  uint32_t ordinal;
  std::vector<float> weight, m, v, grad, seen;  // seen: the compute weights, as BACKWARD reads them

  fsdp_dtype grad_dtype() const { return first_of(group.options.grad_dtype, setup.model.grad_dtype, param.dtype); }
  fsdp_dtype wire_dtype() const { return first_of(group.options.reduce_dtype, setup.model.reduce_dtype, grad_dtype()); }
  bool last_only() const {
    const fsdp_strategy strategy = group.options.strategy ? group.options.strategy : setup.model.strategy;
    if (strategy == FSDP_STRATEGY_OPTIM) return true;
    if (setup.model.reduce_policy) return setup.model.reduce_policy == FSDP_REDUCE_POLICY_LAST;
    return strategy == FSDP_STRATEGY_NO_SHARD;
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
    const float factor = setup.model.grad_op == FSDP_GRAD_OP_SUM      ? 1.0f
                         : setup.model.grad_op == FSDP_GRAD_OP_FACTOR ? static_cast<float>(setup.model.grad_factor)
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
      std::vector<float> local(setup.ranks), totals(replicas());
      for (uint32_t k = 0; k < setup.microbatches; ++k) {
        for (uint32_t r = 0; r < setup.ranks; ++r) {
          const float g = gradient(r, step, k, ordinal, i, seen[i]);
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
  void clip(double factor) {
    if (factor == 1) return;
    for (float &g : grad) g *= static_cast<float>(factor);
  }
  // In fp32, one rounded operation at a time (docs/contracts/numerics.md), next to the formula in double from the same
  // state.
  void adamw(uint32_t step) {
    const double wide_c1 = 1 - std::pow(0.9, step + 1), wide_c2 = 1 - std::pow(0.999, step + 1);
    const double wide_lr = 0.01 * (param.lr_scale != 0 ? param.lr_scale : 1);
    const double wide_decay = param.flags & FSDP_PARAM_NO_DECAY ? 0 : setup.weight_decay;
    const auto c1 = static_cast<float>(wide_c1), c2 = static_cast<float>(wide_c2);
    const auto rest1 = static_cast<float>(1 - 0.9), rest2 = static_cast<float>(1 - 0.999);
    const auto lr = static_cast<float>(wide_lr), decay = lr * static_cast<float>(wide_decay);
    for (uint64_t i = 0; i < weight.size(); ++i) {
      const double g = grad[i], w = weight[i];
      const double wide_m = 0.9 * m[i] + 0.1 * g, wide_v = 0.999 * v[i] + 0.001 * g * g;
      const double wide =
          w - wide_lr * wide_decay * w - wide_lr * (wide_m / wide_c1) / (std::sqrt(wide_v / wide_c2) + 1e-8);
      m[i] = m[i] + (rest1 * grad[i] - rest1 * m[i]);
      v[i] = v[i] + (rest2 * grad[i] * grad[i] - rest2 * v[i]);
      const float decayed = weight[i] - decay * weight[i];
      weight[i] = decayed - lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + 1e-8f);
      require(!(std::abs(weight[i] - wide) > 1e-6), "the reference's AdamW is that of fp64, but for rounding");
    }
    keep(step + 1);
  }
  // SGD with momentum, as update_own() does it.
  void momentum(uint32_t step) {
    for (uint64_t i = 0; i < weight.size(); ++i) {
      m[i] = 0.9f * m[i] + grad[i];
      weight[i] = weight[i] - 0.01f * m[i];
    }
    keep(step + 1);
  }
  // The values that remain if weights and states have fewer bits than fp32.
  void keep(uint32_t step) {
    if (storage_of(setup, group, param) == FSDP_MAIN_NONE)
      for (uint64_t i = 0; i < weight.size(); ++i)
        weight[i] = round_randomly(weight[i], setup.model.rounding_seed, param.name, i, step);
    if (!has_codes(setup, param)) return;
    encode_and_decode(m, true);
    encode_and_decode(v, false);
  }
};

std::string name_of(const Scenario &setup, size_t ordinal) {
  for (const GroupDef &group : setup.groups) {
    if (ordinal < group.params.size()) return "'" + group.params[ordinal].name + "'";
    ordinal -= group.params.size();
  }
  return "?";
}

std::string text_of(const Scenario &setup, const View &view) {
  return name_of(setup, view.ordinal) + " in phase " + std::to_string(view.phase) + " of version " +
         std::to_string(view.version);
}

std::string first_difference(const std::vector<std::vector<float>> &a, const std::vector<std::vector<float>> &b,
                             const std::vector<std::vector<uint8_t>> *which, const Scenario &setup) {
  if (a.size() != b.size()) return std::to_string(a.size()) + " parameters, not " + std::to_string(b.size());
  for (size_t p = 0; p < a.size(); ++p) {
    if (a[p].size() != b[p].size()) return "the size of " + name_of(setup, p);
    for (size_t i = 0; i < a[p].size(); ++i)
      if ((!which || (*which)[p][i]) && std::bit_cast<uint32_t>(a[p][i]) != std::bit_cast<uint32_t>(b[p][i]))
        return name_of(setup, p) + "[" + std::to_string(i) + "] is " + std::to_string(a[p][i]) + ", not " +
               std::to_string(b[p][i]);
  }
  return {};
}

// Every visit of every phase must have been seen.
size_t view_count(const Scenario &setup) {
  size_t params = 0;
  for (const GroupDef &group : setup.groups) params += group.params.size();
  return params * setup.steps * (setup.microbatches * (setup.recompute ? 3 : 2) + (setup.eval ? 1 : 0));
}

// All ranks together own all that is trained.
std::string missing_owner(const Scenario &setup, const std::vector<Outcome> &outcomes) {
  size_t ordinal = 0;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      for (uint64_t i = 0; i < param.count() && !(param.flags & FSDP_PARAM_FROZEN); ++i)
        if (std::none_of(outcomes.begin(), outcomes.end(),
                         [&](const Outcome &outcome) { return outcome.owned[ordinal][i] != 0; }))
          return "nobody owns '" + param.name + "'[" + std::to_string(i) + "]";
      ++ordinal;
    }
  return {};
}

std::string rank_difference(const Scenario &setup, const Outcome &outcome, const Outcome &expected) {
  if (const auto text = first_difference(outcome.weights, expected.weights, nullptr, setup); !text.empty())
    return "the weight " + text;
  if (const auto text = first_difference(outcome.grads, expected.grads, &outcome.owned, setup); !text.empty())
    return "the main grad " + text;
  if (outcome.norms.size() != expected.norms.size()) return "the number of norms";
  for (size_t s = 0; s < expected.norms.size(); ++s)
    if (!(std::abs(outcome.norms[s] - expected.norms[s]) <= 1e-12 * expected.norms[s]))
      return "the norm of step " + std::to_string(s) + " is " + std::to_string(outcome.norms[s]) + ", not " +
             std::to_string(expected.norms[s]);
  if (outcome.views.size() != view_count(setup)) return "the number of views: " + std::to_string(outcome.views.size());
  for (const View &view : outcome.views)
    if (const auto &versions = view.phase == FSDP_BACKWARD ? expected.backward_versions : expected.versions;
        view.hash != versions.at(view.version - 1).at(view.ordinal))
      return "what was read of " + text_of(setup, view);
  return {};
}

}  // namespace

Outcome reference(const Scenario &setup) {
  std::vector<ReferenceParam> params;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      ReferenceParam p{setup, group, param, static_cast<uint32_t>(params.size()), {}, {}, {}, {}, {}};
      for (uint64_t i = 0; i < param.count(); ++i) p.weight.push_back(initial_weight(p.ordinal, i));
      if (storage_of(setup, group, param) == FSDP_MAIN_NONE)
        for (float &weight : p.weight) weight = round_to(weight, FSDP_BFLOAT16);
      p.m.assign(p.weight.size(), 0);
      p.v.assign(p.weight.size(), 0);
      p.grad.assign(p.weight.size(), 0);
      params.push_back(std::move(p));
    }
  Outcome outcome;
  const auto publish = [&] {
    std::vector<uint64_t> &forward = outcome.versions.emplace_back();
    std::vector<uint64_t> &backward = outcome.backward_versions.emplace_back();
    for (auto &p : params) {
      p.seen = seen_of(setup, p.group, p.param, p.weight, true);
      backward.push_back(hash_of(p.seen));
      forward.push_back(p.param.quantization == FSDP_QUANTIZE_MXFP8
                            ? hash_of(seen_of(setup, p.group, p.param, p.weight, false))
                            : backward.back());
    }
  };
  publish();
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
      if (!(p.param.flags & FSDP_PARAM_FROZEN)) {
        p.clip(factor);
        p.param.by_caller() ? p.momentum(step) : p.adamw(step);
      }
    publish();
  }
  for (auto &p : params) {
    // A frozen parameter is read back as it is kept.
    if (p.param.flags & FSDP_PARAM_FROZEN) p.weight = seen_of(setup, p.group, p.param, p.weight, false);
    outcome.weights.push_back(p.weight);
    outcome.grads.push_back(p.grad);
  }
  return outcome;
}

std::string difference(const Scenario &setup, const std::vector<Outcome> &outcomes, const Outcome &expected) {
  if (outcomes.size() != setup.ranks) return "there are " + std::to_string(outcomes.size()) + " ranks";
  for (size_t r = 0; r < outcomes.size(); ++r)
    if (const std::string text = rank_difference(setup, outcomes[r], expected); !text.empty())
      return "rank " + std::to_string(r) + ": " + text;
  return missing_owner(setup, outcomes);
}

std::string difference(const Scenario &setup, const std::vector<Outcome> &outcomes) {
  return difference(setup, outcomes, reference(setup));
}

std::string view_difference(const Scenario &setup, const std::vector<Outcome> &outcomes) {
  Scenario loaded = setup;
  loaded.steps = 0;
  std::vector<std::vector<uint64_t>> versions(setup.steps + 1);
  versions.front() = reference(loaded).versions.front();
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params)
      versions.back().push_back(
          hash_of(seen_of(setup, group, param, outcomes.at(0).weights.at(versions.back().size()), false)));
  for (auto &hashes : versions) hashes.resize(versions.front().size());
  for (size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r].views.size() != view_count(setup)) return "rank " + std::to_string(r) + ": the number of views";
    for (const View &view : outcomes[r].views) {
      uint64_t &expected = versions.at(view.version - 1).at(view.ordinal);
      if (expected == 0) expected = view.hash;  // for the thread that comes first
      if (view.hash != expected) return "rank " + std::to_string(r) + ": what was read of " + text_of(setup, view);
    }
  }
  return {};
}

// FNV-1a.
uint64_t hash_of(const std::vector<float> &values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3;
  return hash;
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
