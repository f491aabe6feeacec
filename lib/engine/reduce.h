// SPDX-License-Identifier: Apache-2.0
// Gradients: lending full buffers, and reducing them into the main grads on the reduce stream.
//
// A full gradient buffer is written by the caller, read by every peer, then free again. At most max_pending_groups
// transient ones are in use: opening another one first drains the oldest that is being reduced.
#pragma once

#include <span>
#include <vector>

#include "engine/runtime.h"

namespace fsdp::engine {

// A full gradient for the caller to write. accumulate: it is to be added to, else all of it to be overwritten.
struct LentGrad {
  std::byte *data;
  fsdp_dtype dtype;
  bool accumulate;
};

class Reducer {
 public:
  explicit Reducer(Runtime &runtime);

  // zeroed: cleared where it would have to be overwritten.
  LentGrad acquire(Group &group, uint64_t param_index, bool zeroed, fsdp_stream stream,
                   const char *call = "fsdp_acquire_grad");
  // Those of all parameters, with no data where one is frozen; until the next call.
  std::span<const LentGrad> acquire_all(Group &group, bool zeroed, fsdp_stream stream, const char *call);
  void put(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
           fsdp_stream stream);
  void reduce(Group &group, uint32_t flags, fsdp_stream stream);
  // The end of a step that misses nothing.
  void gather_whole();
  // What a step still misses, as text; empty if nothing.
  std::string list_missing() const;
  // Contributions of this step, of groups whose every contribution is reduced.
  uint64_t count_reduces() const noexcept;
  // Debug: gradients that the step has taken fault from now on, or of a device are watched (late_write.cpp).
  void hide_grads(device::Stream &caller);
  // What was written into them since, as text; empty if nothing. They are watched no more.
  std::string list_late_writes();
  // A graph writes them without a call.
  void forget_hidden() noexcept;
  void start_step();
  // The transient buffers.
  struct Pool {
    std::vector<uint32_t> reducing;  // groups whose buffer is being reduced, oldest first
    uint32_t live = 0;               // lent or being reduced
  };
  const Pool &pool() const { return pool_; }
  void set_pool(const Pool &pool) { pool_ = pool; }
  // Of a device: what follows on the stream comes after what wrote lent gradients. A reference to the device's object
  // of the stream may be of another one then, as after check_writers: there are only so many.
  void await_writers(fsdp_stream stream);
  // INVALID_STATE if a stream that wrote lent gradients is being captured, into another graph than the model.
  void check_writers(const Group &group, const char *call) const;

 private:
  void check_open(const Group &group, uint64_t param_index, const char *call) const;
  void open(Group &group, device::Stream &caller, const char *call);
  void await_free(Group &group, device::Stream &caller);
  void make_room(Group &group, device::Stream &caller, const char *call);
  void drain(Group &group, device::Stream &caller);
  // Debug: a late write into a gradient faults on the host.
  void set_access(const Group &group, comm::Access access);
  void hide(Group &group, device::Stream &caller);
  bool written_late(Group &group);
  void check_complete(const Group &group) const;
  // The stream that wrote, or NULL where its order is not of this moment.
  device::Stream *writer(fsdp_stream stream) const;
  void wait_for_writers(Group &group);
  void chain_writers(Group &group);
  void enqueue(Group &group, uint32_t turn);
  void enqueue_local(Group &group, uint32_t turn);
  std::string list_lent() const;

  Runtime &runtime_;
  Pool pool_;
  uint32_t most_live_;
  std::vector<LentGrad> lent_;  // room for the largest group: calls allocate nothing
};

}  // namespace fsdp::engine
