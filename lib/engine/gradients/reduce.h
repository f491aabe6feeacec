// SPDX-License-Identifier: Apache-2.0
// Gradients: lending full buffers, and reducing them into the main grads on the reduce stream.
//
// The full gradients of a part (group.h) are written by the caller into one buffer, which every peer reads; then it is
// free again. At most pending_grads transient ones (memory/model_plan.h) are in use: opening another one first drains
// the oldest that is being reduced. A part is reduced when all of its parameters are complete; what is not is completed
// by the end of the contribution.
#pragma once

#include <span>
#include <vector>

#include "engine/runtime/runtime.h"

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

  // flags: FSDP_GRAD_*.
  LentGrad acquire(Group &group, uint64_t param_index, uint32_t flags, fsdp_stream stream,
                   const char *call = "fsdp_acquire_grad");
  // Those of all parameters, with no data where one is frozen or not trained; until the next call.
  std::span<const LentGrad> acquire_all(Group &group, uint32_t flags, fsdp_stream stream, const char *call);
  void put(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
           uint32_t flags, fsdp_stream stream);
  // This gradient is complete for this contribution: the caller writes it no more.
  void complete(Group &group, uint64_t param_index, fsdp_stream stream);
  void reduce(Group &group, uint32_t flags, fsdp_stream stream);
  // The end of a step that misses nothing.
  void gather_whole();
  // Ends what was reduced without FSDP_LAST, from the last group to the first; a group that nothing was given for has
  // zeros. No gradient may be open.
  void end_groups(fsdp_stream stream);
  // What a step still misses, as text; empty if nothing. ends_groups: those that can be ended miss nothing.
  std::string list_missing(bool ends_groups) const;
  // Contributions of this step, of groups whose every contribution is reduced.
  uint64_t count_reduces() const noexcept;
  // Debug: gradients that the step has taken fault from now on, or of a device are watched (late_write.cpp).
  void hide_grads(device::Stream &caller);
  // What was written into them since, as text; empty if nothing. They are watched no more.
  std::string list_late_writes();
  // A graph writes them without a call.
  void forget_hidden() noexcept;
  void start_step();
  // What is trained has changed.
  void forget_cleared() noexcept { cleared_ = false; }
  // Main grads of parts of which nothing is trained become zeros: of what is trained beside it, sums have made them.
  void clear_untrained_sums(device::Stream &caller);
  // The transient buffers.
  struct Pool {
    std::vector<uint32_t> reducing;  // parts whose buffer is being reduced, oldest first
    uint32_t live = 0;               // lent or being reduced
  };
  const Pool &pool() const { return pool_; }
  void set_pool(const Pool &pool) { pool_ = pool; }
  // Of a device: what follows on the stream comes after what wrote lent gradients. A reference to the device's object
  // of the stream may be of another one then, as after check_writers: there are only so many.
  void await_writers(fsdp_stream stream);
  // INVALID_STATE if a stream that wrote lent gradients is being captured, into another graph than the model.
  void check_writers(const Group &group, const char *call) const;
  // INVALID_STATE unless the step still takes a gradient for every parameter.
  void check_takes_all(const char *call) const;

 private:
  void check_open(const Group &group, uint64_t param_index, const char *call) const;
  void check_unfinished(const Group &group, uint64_t param_index, const char *call) const;
  void check_lends_all(const Group &group, const char *call) const;
  void open(GradPart &part, device::Stream &caller, const char *call);
  void await_free(GradPart &part, device::Stream &caller);
  void clear_untrained(const GradPart &part, device::Stream &caller);
  void make_room(GradPart &part, device::Stream &caller, const char *call);
  [[noreturn]] void refuse_more(const GradPart &part, const char *call) const;
  [[noreturn]] void refuse_shared(const GradPart &part, const GradPart &other, const char *call) const;
  void drain(GradPart &part, device::Stream &caller);
  // BUSY if opening what these parameters of the group need would wait for peers (grad_room.cpp).
  void check_drained(Group &group, uint64_t first, uint64_t end, const device::Stream &caller, const char *call);
  bool is_drained(const GradPart &part) const;
  [[noreturn]] void refuse_wait(const GradPart &part, const GradPart &reduced, const char *call) const;
  // Debug: a late write into a gradient faults on the host.
  void set_access(const GradPart &part, Access access);
  void hide(GradPart &part, device::Stream &caller);
  bool written_late(GradPart &part);
  std::string describe_late_write(const GradPart &part) const;
  // INVALID_STATE unless these can be lent beside all that are.
  void check_room(std::span<const GradPart> opened, const char *call) const;
  void check_complete(const Group &group) const;
  // The stream that wrote, or NULL where its order is not of this moment.
  device::Stream *writer(fsdp_stream stream) const;
  void wait_for_writers(GradPart &part);
  void chain_writers(GradPart &part);
  void reduce_part(GradPart &part);
  void reduce_parts(Group &group, bool last);
  void end_group(Group &group);
  void give_zeros(Group &group, fsdp_stream stream);
  void sum_outer(Group &group, const device::Event *reduced);
  void end_contribution(Group &group);
  void warn_of_narrow_sum(const Group &group);
  void enqueue(GradPart &part, uint32_t turn);
  void enqueue_local(GradPart &part, uint32_t turn);
  std::string list_lent() const;

  Runtime &runtime_;
  Pool pool_;
  uint32_t max_live_;
  std::vector<LentGrad> lent_;  // room for the largest group: calls allocate nothing
  // What acquiring would do to each part: scratch of check_drained.
  struct Would {
    bool open = false, drain = false;
  };
  std::vector<Would> would_;
  bool narrow_sum_told_ = false;
  bool cleared_ = true;  // are main grads of parts of which nothing is trained zeros?
};

}  // namespace fsdp::engine
