// SPDX-License-Identifier: Apache-2.0
// Models with matrices whose gradients are small whole numbers, so that their sums are exact in fp32 in any order, and
// what the ranks have of them together.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "harness.h"

namespace harness {

// A group of single matrices, one of splits, one of stacks, and parameters that are no matrices.
inline std::vector<GroupDef> matrix_groups() {
  const auto matrix = [](const char *name, std::vector<uint64_t> shape, std::vector<uint64_t> splits = {}) {
    ParamDef param{name, std::move(shape)};
    param.matrix = FSDP_MATRIX_LAST_TWO;
    param.splits = std::move(splits);
    return param;
  };
  return {{"first", {matrix("up", {10, 4}), {"up.bias", {10}}, matrix("down", {4, 10})}},
          {"attention", {matrix("qkv", {24, 8}, {16, 4, 4}), {"norm", {8}}}},
          {"experts", {matrix("stack", {6, 5, 4}), matrix("pairs", {2, 3, 4, 6}, {1, 3})}}};
}

// Whole values of all parameters, one after the other, that the ranks put together from their shards.
class Whole {
 public:
  explicit Whole(const std::vector<GroupDef> &groups) {
    for (const GroupDef &group : groups)
      for (const ParamDef &param : group.params) values_.emplace_back(param.count(), -12345.0F);
  }
  // If two ranks have an element, both must have the same value.
  void add(uint32_t ordinal, uint64_t first, const std::vector<float> &values) {
    const std::lock_guard lock(mutex_);
    for (uint64_t i = 0; i < values.size(); ++i) {
      float &at = values_[ordinal][first + i];
      REQUIRE(at == -12345.0F || at == values[i]);
      at = values[i];
    }
  }
  const std::vector<std::vector<float>> &values() const { return values_; }

 private:
  std::mutex mutex_;
  std::vector<std::vector<float>> values_;
};

// The gradient that all ranks have together: a quarter of a small whole number.
inline float whole_grad(uint32_t ordinal, uint64_t i) {
  return static_cast<float>(static_cast<int64_t>((5 * i + 3 + 7 * ordinal) % 13) - 6) / 4;
}

// Opens the update window. Rank r gives each gradient r times, and less (ranks * (ranks - 1) / 2 - 1) times on rank 0.
inline void give_whole_grads(Rank &rank, uint32_t microbatches = 1) {
  const auto ranks = static_cast<int>(rank.setup.ranks);
  const int share = rank.rank ? static_cast<int>(rank.rank) : 1 - ranks * (ranks - 1) / 2;
  for (uint32_t m = 0; m < microbatches; ++m)
    for (size_t g = rank.groups.size(); g-- > 0;) {
      for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
        std::vector<float> grad(rank.def(g).params[p].count());
        for (uint64_t i = 0; i < grad.size(); ++i)
          grad[i] = static_cast<float>(share) * whole_grad(rank.setup.ordinal(g, p), i) * (m ? 0.0F : 1.0F);
        const Placed placed(grad);
        FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, grad.size(), 0, stream()));
      }
      FSDP(fsdp_reduce_grad(rank.groups[g], m + 1 == microbatches ? FSDP_LAST : 0, stream()));
    }
  FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
}

// The operation of a test on each matrix of rows x columns. It differs for any two matrices.
inline float changed(const std::vector<float> &matrix, uint64_t rows, uint64_t columns, uint64_t row, uint64_t column,
                     uint64_t batch, uint64_t split) {
  const float reversed = matrix[(rows - 1 - row) * columns + column];
  return reversed * static_cast<float>(1 + split) + static_cast<float>(batch);
}

// Changes all matrices of this rank, and calls `visit` with each call's matrices before.
inline void change_matrices(Rank &rank, const std::function<void(const fsdp_matrix &)> &visit = {}) {
  for (;;) {
    fsdp_matrix given = FSDP_MATRIX_INIT;
    FSDP(fsdp_next_matrix(rank.model, stream(), &given));
    if (!given.data) return;
    if (visit) visit(given);
    for (uint64_t m = 0; m < given.count; ++m) {
      auto *const data = static_cast<std::byte *>(given.data) + m * given.stride_bytes;
      const std::vector<float> matrix = load_elements(data, given.dtype, given.rows * given.columns);
      std::vector<float> result(matrix.size());
      for (uint64_t i = 0; i < result.size(); ++i)
        result[i] = changed(matrix, given.rows, given.columns, i / given.columns, i % given.columns,
                            given.batch_index + m, given.split_index);
      store_elements(data, given.dtype, result);
    }
  }
}

// The result of one process that changes all matrices of these values.
inline std::vector<std::vector<float>> change_alone(const std::vector<GroupDef> &groups,
                                                    std::vector<std::vector<float>> values) {
  uint32_t ordinal = 0;
  for (const GroupDef &group : groups)
    for (const ParamDef &param : group.params) {
      std::vector<float> &all = values[ordinal++];
      if (!param.matrix) continue;
      const uint64_t columns = param.shape.back(), rows = param.shape[param.shape.size() - 2];
      const std::vector<uint64_t> splits = param.splits.empty() ? std::vector{rows} : param.splits;
      for (uint64_t batch = 0; batch < all.size() / (rows * columns); ++batch) {
        uint64_t first = batch * rows * columns;
        for (uint64_t split = 0; split < splits.size(); first += splits[split++] * columns) {
          const std::vector<float> matrix(all.begin() + static_cast<ptrdiff_t>(first),
                                          all.begin() + static_cast<ptrdiff_t>(first + splits[split] * columns));
          for (uint64_t i = 0; i < matrix.size(); ++i)
            all[first + i] = changed(matrix, splits[split], columns, i / columns, i % columns, batch, split);
        }
      }
    }
  return values;
}

inline uint32_t ordinal_of(const Rank &rank, const fsdp_shard &shard) {
  for (size_t g = 0; g < rank.groups.size(); ++g)
    if (rank.groups[g] == shard.group) return rank.setup.ordinal(g, shard.param_index);
  throw std::runtime_error("a shard of no group");
}

namespace matrices {

// How the ranks are arranged.
enum class Axis { one, hsdp, hfsdp, hosts };

struct Shape {
  uint32_t ranks = 2;
  fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
  Axis axis = Axis::one;
  uint32_t inner = 1;  // ranks of a replica, or of a host
  uint64_t matrix_bytes = 0;
  uint32_t microbatches = 1;

  std::string text() const {
    return std::to_string(ranks) + " ranks, strategy " + std::to_string(strategy) + ", axis " +
           std::to_string(static_cast<int>(axis)) + " by " + std::to_string(inner) + ", matrix_bytes " +
           std::to_string(matrix_bytes);
  }
};

inline Scenario scenario_of(const Shape &shape, std::vector<GroupDef> groups = matrix_groups()) {
  Scenario setup = harness::scenario_of(shape.strategy, shape.ranks, 0);
  setup.groups = std::move(groups);
  setup.model.grad_op = FSDP_GRAD_OP_SUM;
  setup.model.matrix_bytes = shape.matrix_bytes;
  if (shape.axis == Axis::hosts) setup.context.ranks_per_host = shape.inner;
  if (shape.axis == Axis::hsdp || shape.axis == Axis::hfsdp) {
    setup.mesh.replicate_size = shape.ranks / shape.inner;
    setup.mesh.shard_size = shape.inner;
  }
  if (shape.axis == Axis::hfsdp) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  return setup;
}

inline std::vector<std::vector<float>> whole_grads(const Scenario &setup) {
  std::vector<std::vector<float>> grads;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      std::vector<float> grad(param.count());
      for (uint64_t i = 0; i < grad.size(); ++i) grad[i] = whole_grad(static_cast<uint32_t>(grads.size()), i);
      grads.push_back(std::move(grad));
    }
  return grads;
}

// Adds this rank's main grads, main weights or state.
inline void add_shards(Rank &rank, Whole &whole, const char *name) {
  const std::vector<fsdp_shard> shards = rank.shards();
  for (uint64_t s = 0; s < shards.size(); ++s) {
    const void *data = shards[s].main_grad;
    fsdp_dtype dtype = FSDP_FLOAT32;
    if (name && std::string(name) == "main_weight") {
      data = shards[s].main_weight, dtype = shards[s].main_weight_dtype;
    } else if (name) {
      fsdp_tensor state = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_shard_state(rank.model, s, name, &state));
      data = state.data, dtype = state.dtype;
    }
    whole.add(ordinal_of(rank, shards[s]), shards[s].element_offset,
              load_elements(data, dtype, shards[s].element_count));
  }
}

inline void collect(Rank &rank, const char *source = nullptr, const char *target = nullptr, fsdp_dtype dtype = 0) {
  fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
  options.source = source;
  options.target = target;
  options.dtype = dtype;
  FSDP(fsdp_collect_matrices(rank.model, &options, stream()));
}

inline void publish(Rank &rank) { FSDP(fsdp_publish_weights(rank.model, stream())); }

}  // namespace matrices

}  // namespace harness
