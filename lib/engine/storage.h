// SPDX-License-Identifier: Apache-2.0
// All memory of a sealed model on this rank, and where each bucket's planes lie in it. Everything is allocated and
// populated by the constructor; nothing moves afterwards.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "device/device.h"
#include "engine/teams.h"
#include "memory/model_plan.h"

namespace fsdp::engine {

// Memory that the caller handed in for a role.
struct CallerArena {
  std::byte *data = nullptr;
  uint64_t size_bytes = 0;
};

// Which elements a plane has: those of the full buffer, of this rank's shard, or of the shards of its inner rank's slots.
enum class Extent { shard, group, whole };

// One stored form of a parameter's elements on this rank, as long as the plan says.
struct Plane {
  std::byte *data = nullptr;
  fsdp_dtype dtype = FSDP_FLOAT32;
  Extent extent = Extent::shard;

  std::byte *at(const layout::Slice &slice) const;
};

struct Bucket {
  const memory::BucketPlan *plan = nullptr;
  Plane compute;              // where this rank writes its compute weights (indexed by full offsets)
  const std::byte *view = nullptr;  // whole compute weights for readers, NULL where a gather fills a pool buffer
  comm::Source compute_source;      // of the full buffer's start; rank r's copy is stride bytes on (0: one for all)
  Plane main;                 // data NULL for frozen buckets
  Plane grad;                 // main grads
  std::vector<Plane> states;  // in the order declared
  std::array<float *, 2> partial{};  // inner sums, by turn
  std::byte *wire = nullptr;         // rounded gradients, NULL where the communicator needs no room for them
  std::byte *full_grad = nullptr;  // this rank's full gradient buffer
  comm::Source full_grad_source;
  comm::Source whole_grad_source;  // no_shard: every rank's whole main grads
};

// Runs the body; what it throws, as an Error.
std::optional<Error> catch_error(const std::function<void()> &body);
// Collective: if any rank has an error, every rank throws (its own, or the lowest rank's).
void share_outcome(comm::Team &team, const std::optional<Error> &mine);

class Storage {
 public:
  // Collective over all ranks of the model. early: why this rank cannot go on at all; then every rank throws it.
  Storage(const memory::ModelSpec &spec, const memory::ModelPlan &plan, const std::map<fsdp_role, CallerArena> &callers,
          const Teams &teams, device::Device &device, std::optional<Error> early = {});

  const std::vector<Bucket> &buckets() const { return buckets_; }
  std::byte *gather_pool() const { return gather_.data; }
  // Collective: private memory that collectives of the team will name.
  void register_with(comm::Team &team) const;
  // On a device, for graphs: one for each batch of the optimizer.
  device::AdamW *steps() const { return steps_ ? reinterpret_cast<device::AdamW *>(steps_->data()) : nullptr; }
  double *scratch() const { return reinterpret_cast<double *>(scratch_.data); }
  comm::Arena *shared_compute() const { return shared_compute_.get(); }
  comm::Arena *staging() const { return staging_.get(); }
  // Bytes by role as the allocators report them; [0] is the sum.
  const std::array<uint64_t, 8> &allocated_bytes() const { return allocated_; }

 private:
  struct Region {
    std::unique_ptr<device::Memory> memory;  // NULL if the caller handed it in
    std::byte *data = nullptr;
  };
  Region allocate(fsdp_role role, uint64_t bytes);
  void allocate_private();
  void allocate_shared();
  std::unique_ptr<comm::Arena> create_shared_compute();
  static std::unique_ptr<comm::Arena> create_parts(comm::Team &team, uint64_t part_bytes, const char *what);
  void clear(std::byte *data, uint64_t bytes);
  void place(uint32_t index);
  void place_compute(const memory::BucketPlan &plan, const memory::GroupPlan &group, Bucket &bucket) const;
  void place_grads(const memory::BucketPlan &plan, const memory::GroupPlan &group, Bucket &bucket) const;

  const memory::ModelSpec &spec_;
  const memory::ModelPlan &plan_;
  const std::map<fsdp_role, CallerArena> &callers_;
  comm::Team &host_team_;  // the inner ranks
  comm::Team &team_;       // ... over memory of the device
  device::Device &device_;
  std::array<uint64_t, 8> allocated_{};
  std::unique_ptr<comm::Arena> shared_compute_, whole_compute_, shard_compute_, grads_, staging_;
  Region local_compute_, main_, grad_, optimizer_, gather_, scratch_, partial_, wire_;
  std::unique_ptr<device::Memory> steps_;
  std::vector<Bucket> buckets_;
};

}  // namespace fsdp::engine
