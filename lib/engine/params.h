// SPDX-License-Identifier: Apache-2.0
// Whole parameters in and out: loading full data into shards, and reading shards back as full data.
#pragma once

#include <optional>
#include <string>

#include "engine/runtime.h"

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
  void load(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
            int32_t root);
  void read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count, int32_t root);

 private:
  // What the rank of the mesh has where loads write: main weights, or the compute weights of a frozen parameter.
  layout::Slice owned(const ParamPlace &place, uint32_t rank) const;
  // What a call moves, and where this rank keeps its part of it.
  struct Tensor {
    const char *call;
    ParamPlace place;
    const Plane &plane;
    std::string name;
  };
  Tensor weights_of(Group &group, uint64_t param_index, const char *call);
  Tensor state_of(Group &group, uint64_t param_index, const std::string &state, const char *call);
  void load(Group &group, uint64_t param_index, const Tensor &tensor, const void *data, fsdp_dtype dtype,
            uint64_t element_count, int32_t root);
  void read(Group &group, uint64_t param_index, const Tensor &tensor, void *data, fsdp_dtype dtype,
            uint64_t element_count, int32_t root);
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
    fsdp_dtype dtype;
    const char *name;
  };
  // fill on the owner, then take on every rank.
  template <class Fill, class Take>
  void stage(const ShownBytes &piece, Fill fill, Take take);
  void copy(std::byte *to, const std::byte *from, fsdp_dtype dtype, uint64_t count);
  void meet(const comm::Tag &tag, device::Stream &caller);
  // The place in the mesh of a root, which is a rank of the job.
  std::optional<uint32_t> find_root(int32_t root, const char *call) const;
  void check(const Group &group, uint64_t param_index, fsdp_dtype dtype, uint64_t element_count, const char *call);

  Runtime &runtime_;
  std::unique_ptr<comm::Collectives> outer_;  // NULL: there is no outer axis
};

}  // namespace fsdp::engine
