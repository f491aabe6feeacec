// SPDX-License-Identifier: Apache-2.0
// Gradients: lends full buffers, and reduces them into the main grads on the reduce stream.
//
// The caller writes the full gradients of a part (group.h) into one buffer. Every peer reads the buffer, and then it is
// free again. At most pending_grads transient buffers (memory/model_plan.h) are in use: opening another one first
// drains the oldest buffer that is being reduced. A part is reduced when all of its parameters are complete. The end of
// the contribution completes the remaining parameters.
#pragma once

#include <span>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// A full gradient for the caller to write. If `accumulate`, the caller must add to it; if not, the caller must
// overwrite all of it.
struct LentGrad {
  std::byte *data;
  fsdp_dtype dtype;
  bool accumulate;
};

class Reducer {
 public:
  explicit Reducer(Runtime &runtime);

  // `flags` are FSDP_GRAD_*.
  LentGrad acquire(Group &group, uint64_t param_index, uint32_t flags, fsdp_stream stream,
                   const char *call = "fsdp_acquire_grad");
  // Acquires the gradients of all parameters; the entry of a frozen or untrained parameter has no data. The result is
  // valid until the next call.
  std::span<const LentGrad> acquire_all(Group &group, uint32_t flags, fsdp_stream stream, const char *call);
  void put(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
           uint32_t flags, fsdp_stream stream);
  // Declares this gradient complete for this contribution: the caller no longer writes it.
  void complete(Group &group, uint64_t param_index, fsdp_stream stream);
  void reduce(Group &group, uint32_t flags, fsdp_stream stream);
  // Called at the end of a step that lacks nothing.
  void gather_whole();
  // Ends groups that were reduced without FSDP_LAST, from the last group to the first. A parameter without a gradient
  // gets zeros. No gradient may be open.
  void end_groups(fsdp_stream stream);
  // Says what a step still lacks; empty if it lacks nothing. With `ends_groups`, groups that can be ended lack nothing.
  std::string list_missing(bool ends_groups) const;
  // The number of contributions in this step, counted over the groups that reduce every contribution.
  uint64_t count_reduces() const noexcept;
  // Debug mode: from now on, a write to a gradient that the step has taken faults. On a device these gradients are
  // watched instead.
  void hide_grads(device::Stream &caller);
  // Describes late writes to hidden gradients; empty if there are none. Stops watching these gradients.
  std::string list_late_writes();
  // Stops watching, because the gradients are written by a graph and not by a call.
  void forget_hidden() noexcept;
  void start_step();
  // Called when the set of trained parameters has changed.
  void forget_cleared() noexcept { cleared_ = false; }
  // Clears main grads of parts without a trained parameter. In other parts the sums write the main grads.
  void clear_untrained_sums(device::Stream &caller);
  // The state of the transient buffers.
  struct Pool {
    std::vector<uint32_t> reducing;  // parts whose buffer is being reduced, oldest first
    uint32_t live = 0;               // number of buffers that are lent or being reduced
  };
  const Pool &pool() const { return pool_; }
  void set_pool(const Pool &pool) { pool_ = pool; }
  // On a device: orders later work on the stream after the work that wrote lent gradients. Afterwards a reference to
  // the device's object for the stream may belong to another stream, because there are only a few such objects. The
  // same is true after check_writers().
  void await_writers(fsdp_stream stream);
  // Throws INVALID_STATE if a stream that wrote lent gradients is being captured into a different graph than the model.
  void check_writers(const Group &group, const char *call) const;
  // Throws INVALID_STATE unless the step still takes a gradient for every parameter.
  void check_takes_all(const char *call) const;

 private:
  void check_open(const Group &group, uint64_t param_index, const char *call) const;
  void check_unfinished(const Group &group, uint64_t param_index, const char *call) const;
  void check_lends_all(const Group &group, const char *call) const;
  void open(GradPart &part, device::Stream &caller, const char *call);
  void await_free(GradPart &part, device::Stream &caller);
  void clear_in_file(const Plane &sums, uint64_t count) const;
  void clear_untrained(const GradPart &part, device::Stream &caller);
  void make_room(GradPart &part, device::Stream &caller, const char *call);
  [[noreturn]] void refuse_more(const GradPart &part, const char *call) const;
  [[noreturn]] void refuse_shared(const GradPart &part, const GradPart &other, const char *call) const;
  void drain(GradPart &part, device::Stream &caller);
  // Throws BUSY if opening the buffers of these parameters would wait for peers.
  void check_drained(Group &group, uint64_t first, uint64_t end, const device::Stream &caller, const char *call);
  bool is_drained(const GradPart &part) const;
  [[noreturn]] void refuse_wait(const GradPart &part, const GradPart &reduced, const char *call) const;
  // Debug mode: sets the access to the gradient; on the host a late write then faults.
  void set_access(const GradPart &part, Access access);
  void hide(GradPart &part, device::Stream &caller);
  bool written_late(GradPart &part);
  std::string describe_late_write(const GradPart &part) const;
  // Throws INVALID_STATE unless these parts can be lent in addition to those that are lent already.
  void check_room(std::span<const GradPart> opened, const char *call) const;
  void check_complete(const Group &group) const;
  // The stream that wrote a gradient, or NULL if its work cannot be ordered now.
  device::Stream *writer(fsdp_stream stream) const;
  void wait_for_writers(GradPart &part);
  void chain_writers(GradPart &part);
  uint32_t take_turn(GradPart &part);
  void reduce_part(GradPart &part, bool last = false);
  void reduce_parts(Group &group, bool last);
  void end_group(Group &group);
  void give_zeros(Group &group, fsdp_stream stream);
  bool stays_for_outer(const GradPart &part, bool last) const;
  void sum_outer(Group &group, const device::Event *reduced, bool stays);
  void end_contribution(Group &group);
  void warn_of_narrow_sum(const Group &group);
  void enqueue(GradPart &part, uint32_t turn);
  void enqueue_local(GradPart &part, uint32_t turn);
  std::string list_lent() const;

  Runtime &runtime_;
  Pool pool_;
  uint32_t max_live_;
  std::vector<LentGrad> lent_;  // has room for the largest group, so calls allocate nothing
  // The effect that acquiring would have on each part: scratch memory of check_drained().
  struct AcquireEffect {
    bool open = false, drain = false;
  };
  std::vector<AcquireEffect> effects_;
  bool warned_of_narrow_sum_ = false;
  bool cleared_ = true;  // main grads of parts without a trained parameter are zeros
};

}  // namespace fsdp::engine
