// SPDX-License-Identifier: Apache-2.0
// Whole parameters in and out: loading full data into shards, and reading shards back as full data.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class Params {
 public:
  // Collective over the outer ranks, if there are any.
  explicit Params(Runtime &runtime);

  // Rows of this rank's own.
  void load_rows(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t row_offset,
                 uint64_t row_count);
  void load_state(Group &group, uint64_t param_index, const std::string &state, const void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root);
  void read_state(Group &group, uint64_t param_index, const std::string &state, void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root);
  // A main gradient, in an update window that has them.
  void load_grad(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                 int32_t root);
  void read_grad(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count,
                 int32_t root);
  void load(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count, int32_t root);
  // A stored plane of a frozen quantized parameter, bit for bit.
  void load_plane(Group &group, uint64_t param_index, PlaneKind kind, uint32_t form, const void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root);

 private:
  // What a call moves, and where this rank keeps its part of it: of weights where loads write, which are main weights,
  // or the compute weights of a frozen parameter.
  struct Tensor {
    const char *call;
    ParamPlace place;
    const Plane &plane;
    const memory::ParamSpec &param;
    std::string name;
    bool stored = false;  // it is a plane as such

    uint64_t count() const { return plane.layout->tensors[place.tensor].count; }
    // Numbers become codes and scales, and these become numbers.
    bool is_converted() const { return !stored && param.frozen() && param.quantized(); }
  };
  // What the rank of the mesh has of it.
  layout::Slice owned(const Tensor &tensor, uint32_t rank) const;
  Tensor weights_of(Group &group, uint64_t param_index, const char *call);
  Tensor state_of(Group &group, uint64_t param_index, const std::string &state, const char *call);
  Tensor grad_of(Group &group, uint64_t param_index, const char *call);
  void load(const Group &group, const Tensor &tensor, const void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void read(const Group &group, const Tensor &tensor, void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void check_blocks(const Tensor &tensor, uint64_t row_offset, uint64_t row_count) const;
  // All of it comes to take(from, first, count), from here or from the root piece by piece.
  template <class Take>
  void bring(const Tensor &tensor, const std::byte *data, fsdp_dtype dtype, std::optional<uint32_t> root, Take take);
  // The dtype in which it comes from the root, which alone knows. What is wrong with its data is an error on all ranks.
  fsdp_dtype offered(const Group &group, const Tensor &tensor, const void *data, fsdp_dtype dtype,
                     uint64_t element_count, uint32_t root);
  // Where peers follow, all of them have the memory or none goes on.
  void attempt(const Tensor &tensor, bool together, const std::function<void()> &step);
  void load_converted(const Tensor &tensor, const std::byte *data, fsdp_dtype dtype, std::optional<uint32_t> root);
  void read_converted(const Tensor &tensor, std::byte *to, fsdp_dtype dtype, bool reads);
  // Whole, as far as this rank reads.
  void copy_out(const Tensor &tensor, std::byte *to, fsdp_dtype dtype, bool reads);
  // Is all of it here?
  bool is_here(const Tensor &tensor) const;
  // Writes [first, first + count) of the parameter, given as `from`, as far as this rank owns it.
  void store(const Tensor &tensor, const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count);
  std::vector<uint32_t> holders(const ParamPlace &place) const;
  bool travels(const ParamPlace &place) const;
  // Some bytes of one rank, shown to all ranks, or to those of its outer index.
  struct ShownBytes {
    const char *call;
    uint32_t owner;  // rank of the mesh
    uint32_t shown;  // the same on all ranks that compare
    bool travels;
    uint64_t bytes;
    fsdp_dtype dtype;  // 0: not of numbers
    const char *name;
  };
  // fill on the owner, then take on every rank.
  template <class Fill, class Take>
  void stage(const ShownBytes &piece, Fill fill, Take take);
  void copy(std::byte *to, const std::byte *from, fsdp_dtype dtype, uint64_t count);
  void meet(const transport::Tag &tag, device::Stream &caller);
  // The place in the mesh of a root, which is a rank of the job.
  std::optional<uint32_t> find_root(int32_t root, const char *call) const;
  void check(const Group &group, const Tensor &tensor, fsdp_dtype dtype, uint64_t element_count) const;
  void check_data(const Tensor &tensor, const void *data, std::optional<uint32_t> root) const;

  Runtime &runtime_;
  std::unique_ptr<transport::Collectives> outer_;  // NULL: there is no outer axis
};

}  // namespace fsdp::engine
