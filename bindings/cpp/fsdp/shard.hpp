// SPDX-License-Identifier: Apache-2.0
// The parts of parameters that a rank owns. Included by fsdp.hpp.
#ifndef FSDP_SHARD_HPP
#define FSDP_SHARD_HPP

#include <fsdp.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "options.hpp"
#include "tensor.hpp"

namespace fsdp {

/** The elements that a Shard and a ShardChunk both have. */
class ShardElements {
 public:
  std::string name() const { return raw_.name; }
  const fsdp_shard &raw() const noexcept { return raw_; }
  std::uint64_t element_count() const noexcept { return raw_.element_count; }
  template <typename T = float>
  span<T> main_weight() const {
    if (raw_.main_weight == nullptr) return {};
    if (raw_.main_weight_dtype != raw_dtype<T>)
      detail::refuse(FSDP_INVALID_ARGUMENT,
                     "the main weights of " + name() + " are of dtype " + std::to_string(raw_.main_weight_dtype));
    return {static_cast<T *>(raw_.main_weight), static_cast<std::size_t>(raw_.element_count)};
  }
  /** Empty at home in a file, but for a chunk. */
  span<float> main_grad() const {
    if (raw_.main_grad == nullptr) return {};
    return {static_cast<float *>(raw_.main_grad), static_cast<std::size_t>(raw_.element_count)};
  }
  /** With FSDP_MAIN_NONE: rounds numbers stochastically into the main weights, from element `offset` of these on. step
   * is the number of the optimizer's step. On a GPU the numbers are in its memory. */
  void round_stochastic(span<const float> values, std::uint64_t step, std::uint64_t offset = 0,
                        fsdp_stream stream = nullptr) const {
    if (offset > raw_.element_count || values.size() > raw_.element_count - offset)
      detail::refuse(FSDP_INVALID_ARGUMENT, "more numbers than the shard of " + name() + " has elements");
    auto *const to = static_cast<std::uint16_t *>(raw_.main_weight);
    detail::check(fsdp_round_stochastic(raw_.group, raw_.param_index, raw_.element_offset + offset, values.data(),
                                        to ? to + offset : nullptr, values.size(), step, stream));
  }

 protected:
  ShardElements(fsdp_model *model, const fsdp_shard &raw) : model_(model), raw_(raw) {}

  fsdp_model *model_;
  fsdp_shard raw_;
};

/** What this rank owns of one parameter; main weights may be written in the update window only. With
 *  FSDP_MAIN_SPLIT16 they have no address: main_weight() is empty, and Group::read_param and load_param convert. With
 *  FSDP_MAIN_NONE they are the compute weights: main_weight<bfloat16>(), which round_stochastic writes. What is at home
 *  in a file has no address either: Model::shard_chunks brings it. */
class Shard : public ShardElements {
 public:
  Shard(fsdp_model *model, std::uint64_t index) : ShardElements(model, detail::sized<fsdp_shard>()), index_(index) {
    detail::check(fsdp_get_shard(model, index, &raw_));
  }
  Tensor state(const std::string &name) const {
    auto tensor = detail::sized<fsdp_tensor>();
    detail::check(fsdp_get_shard_state(model_, index_, name.c_str(), &tensor));
    return Tensor(tensor);
  }

 private:
  std::uint64_t index_;
};

/** A part of a shard at home in a file, which is in memory until the next call of ShardChunks::next. */
class ShardChunk : public ShardElements {
 public:
  ShardChunk(fsdp_model *model, const fsdp_shard &raw) : ShardElements(model, raw) {}
  Tensor state(const std::string &name) const {
    auto tensor = detail::sized<fsdp_tensor>();
    detail::check(fsdp_get_shard_chunk_state(model_, name.c_str(), &tensor));
    return Tensor(tensor);
  }
};

/** A pass over the chunks of this rank, from Model::shard_chunks. */
class ShardChunks {
 public:
  ShardChunks(fsdp_model *model, fsdp_stream stream) : model_(model), stream_(stream) {}
  /** The next chunk; nothing when all are written to the file. That of the call before is written. */
  std::optional<ShardChunk> next() {
    auto raw = detail::sized<fsdp_shard>();
    detail::check(fsdp_next_shard_chunk(model_, stream_, &raw));
    if (!raw.element_count) return std::nullopt;
    return ShardChunk(model_, raw);
  }

 private:
  fsdp_model *model_;
  fsdp_stream stream_;
};

}  // namespace fsdp

#endif
