// SPDX-License-Identifier: Apache-2.0
// Loads full data of parameters into shards, and reads shards back as full data.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "engine/weights/compact_numbers.h"

namespace fsdp::engine {

class Params {
 public:
  // Collective over the outer ranks, if there are any.
  explicit Params(Runtime &runtime);

  // Loads rows that this rank owns.
  void load_rows(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t row_offset,
                 uint64_t row_count);
  void load_state(Group &group, uint64_t param_index, const std::string &state, const void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root);
  void read_state(Group &group, uint64_t param_index, const std::string &state, void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root);
  // Loads a main gradient, in an update window that has gradients.
  void load_grad(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                 int32_t root);
  void read_grad(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count,
                 int32_t root);
  void load(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count, int32_t root);
  // Loads a stored plane of a frozen quantized parameter, bit for bit.
  void load_plane(Group &group, uint64_t param_index, PlaneKind kind, uint32_t form, const void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root);

 private:
  // The tensor that a call moves, and the plane in which this rank keeps its part. For weights this is where loads
  // write: main weights, or the compute weights of a frozen parameter.
  struct Tensor {
    const char *call;
    ParamPlace place;
    const Plane &plane;
    const memory::ParamSpec &param;
    std::string name;
    bool stored = false;  // the tensor is a stored plane itself
    uint64_t count() const { return plane.layout->tensors[place.tensor].count; }
    // Are numbers converted to codes and scales, and back?
    bool is_converted() const { return !stored && param.frozen() && param.quantized(); }
  };
  // Returns nothing if the tensor's plane stores the numbers themselves. `together`: all peers call this, and if one of
  // them cannot get the memory, all of them fail.
  std::optional<CompactNumbers> compact_numbers(const Tensor &tensor, bool together);
  // The part of the tensor that this rank of the mesh owns.
  layout::Slice owned(const Tensor &tensor, uint32_t rank) const;
  Tensor weights_of(Group &group, uint64_t param_index, const char *call);
  Tensor state_of(Group &group, uint64_t param_index, const std::string &state, const char *call);
  Tensor grad_of(Group &group, uint64_t param_index, const char *call);
  void load(const Group &group, const Tensor &tensor, const void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void read(const Group &group, const Tensor &tensor, void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void check_blocks(const Tensor &tensor, uint64_t row_offset, uint64_t row_count) const;
  // Passes the whole tensor to take(from, first, count), piece by piece. The data comes from this rank or from the
  // root.
  template <class Take>
  void bring(const Tensor &tensor, const std::byte *data, fsdp_dtype dtype, std::optional<uint32_t> root, Take take);
  // The dtype of the root's data, which only the root knows. All ranks throw an error that is in the root's data.
  fsdp_dtype offered(const Group &group, const Tensor &tensor, const void *data, fsdp_dtype dtype,
                     uint64_t element_count, uint32_t root);
  // Runs a step that allocates. `together`: if one peer cannot get its memory, all peers fail.
  void attempt(const Tensor &tensor, bool together, const std::function<void()> &step);
  void load_converted(const Tensor &tensor, const std::byte *data, fsdp_dtype dtype, std::optional<uint32_t> root);
  void read_converted(const Tensor &tensor, std::byte *to, fsdp_dtype dtype, bool reads);
  // Copies out the whole tensor, if this rank reads it.
  void copy_out(const Tensor &tensor, std::byte *to, fsdp_dtype dtype, bool reads);
  // Does this rank have the whole tensor?
  bool is_here(const Tensor &tensor) const;
  // Writes those of the parameter's elements [first, first + count) that this rank owns, from `from`.
  void store(const Tensor &tensor, std::optional<CompactNumbers> &compact, const std::byte *from, fsdp_dtype dtype,
             uint64_t first, uint64_t count);
  std::vector<uint32_t> holders(const Tensor &tensor) const;
  bool travels(const Tensor &tensor) const;
  const MeshComms &comms_of(const Tensor &tensor) const { return runtime_.comms[tensor.plane.plan->mesh]; }
  // Bytes of one rank for all ranks, or for the ranks with its outer index.
  struct ShownBytes {
    const Tensor &tensor;
    uint32_t owner;  // rank of the mesh
    uint32_t shown;  // a number that must be the same on all ranks, which compare it
    bool travels;
    uint64_t bytes;
    fsdp_dtype dtype;  // 0: the bytes are no numbers
  };
  // Calls fill() on the owner, and then take() on every rank.
  template <class Fill, class Take>
  void stage(const ShownBytes &piece, Fill fill, Take take);
  void copy(std::byte *to, const std::byte *from, fsdp_dtype dtype, uint64_t count);
  void meet(transport::Collectives &control, const transport::Tag &tag, device::Stream &caller);
  // The root as a rank of the mesh. `root` is a rank of the job.
  std::optional<uint32_t> find_root(int32_t root, const Tensor &tensor) const;
  void check(const Group &group, const Tensor &tensor, fsdp_dtype dtype, uint64_t element_count) const;
  void check_data(const Tensor &tensor, const void *data, std::optional<uint32_t> root) const;

  Runtime &runtime_;
  std::vector<std::unique_ptr<transport::Collectives>> outer_;  // by mesh; NULL: it has no outer axis
};

}  // namespace fsdp::engine
