// SPDX-License-Identifier: Apache-2.0

#include "engine/gradients/reduce.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace fsdp::engine {

namespace {

// A reduce that reads at most this many bytes is done by the calling thread if no peer is late. To wake a worker would
// take longer.
constexpr uint64_t short_reduce = uint64_t{256} << 10;

}  // namespace

Reducer::Reducer(Runtime &runtime) : runtime_(runtime), max_live_(runtime.plan.pending_grads) {
  pool_.reducing.reserve(runtime.parts.size() + 1);
  size_t most = 0;
  for (const GradPart &part : runtime.parts) set_access(part, Access::none);
  for (const Group &group : runtime.groups) most = std::max(most, group.places.size());
  lent_.reserve(most);
  effects_.resize(runtime.parts.size());
}

void Reducer::set_access(const GradPart &part, Access access) {
  if (runtime_.context.debug() && part.group->plan->trainable) runtime_.storage->set_grad_access(*part.plan, access);
}

// Within a part, each rank may complete parameters in its own order. Parts are reduced in the order in which they
// become complete, and the collectives check that all ranks have the same order.
void Reducer::complete(Group &group, uint64_t param_index, fsdp_stream stream) {
  constexpr auto call = "fsdp_complete_grad";
  const CallSpan span(runtime_, "complete_grad", &group);
  runtime_.place(group, param_index, call);
  check_open(group, param_index, call);
  check_unfinished(group, param_index, call);
  runtime_.caller_stream(stream, call);
  if (!group.grad.acquired[param_index])
    fail(FSDP_INVALID_STATE,
         "{}: parameter '{}' of group '{}' has no gradient in this contribution; write it through fsdp_acquire_grad, "
         "or call fsdp_put_grad with data NULL if there is none",
         call, runtime_.param(group, param_index).name, group.name());
  check_writers(group, call);
  GradPart &part = group.part_of(param_index);
  group.grad.completed[param_index] = 1;
  if (++part.complete_count == part.trained_count() && !group.plan->persistent_grad) reduce_part(part);
}

void Reducer::reduce(Group &group, uint32_t flags, fsdp_stream stream) {
  const CallSpan span(runtime_, "reduce_grad", &group);
  runtime_.caller_stream(stream, "fsdp_reduce_grad");
  if (!group.trained()) return;
  Contribution &grad = group.grad;
  if (grad.last)
    fail(FSDP_INVALID_STATE,
         "fsdp_reduce_grad: group '{}' was already reduced with FSDP_LAST in this step; the next call is "
         "fsdp_finish_grads",
         group.name());
  check_complete(group);
  check_writers(group, "fsdp_reduce_grad");
  const bool last = flags & FSDP_LAST;
  ++grad.given_count;
  grad.last = last;
  if (group.plan->persistent_grad && !last) {
    for (GradPart &part : group.parts) {
      part.stage = GradStage::idle;  // contributions add up in this buffer
      chain_writers(part);
    }
    warn_of_narrow_sum(group);
    return end_contribution(group);
  }
  reduce_parts(group, last);
  end_contribution(group);
}

// Reduces the parts that the contribution has not reduced yet.
void Reducer::reduce_parts(Group &group, bool last) {
  const device::Event *reduced = nullptr;
  for (size_t p = group.parts.size(); p-- > 0;) {
    if (group.parts[p].given || group.parts[p].trained_count() == 0) continue;
    reduce_part(group.parts[p], last);
    reduced = group.parts[p].reduced.get();
  }
  if (const Outer *outer = runtime_.comms_of(group).outer.get(); outer && last && !outer->sums_each())
    sum_outer(group, reduced, reduced && stays_for_outer(group.parts.front(), last));
  ++group.grad.reduced_count;
}

// If a later contribution is small compared with a sum of 16 bits, it is lost. A program that sets grad_dtype has
// chosen that. Other programs are warned, once for each model and by one rank.
void Reducer::warn_of_narrow_sum(const Group &group) {
  if (warned_of_narrow_sum_ || group.spec->grad_dtype) return;
  const auto narrow = [](const memory::ParamSpec &param) {
    return param.has_gradient() && dtype_size(param.dtype) == 2;
  };
  const auto found = std::ranges::find_if(group.spec->params, narrow);
  if (found == group.spec->params.end()) return;
  warned_of_narrow_sum_ = true;
  if (runtime_.team().world_rank(0) != runtime_.context.rank()) return;
  runtime_.context.log(
      FSDP_LOG_WARNING,
      format_text("rank {}: gradients of group '{}' (parameter '{}') add up over micro-batches in {}, the dtype of the "
                  "parameter, since {} reduces only the last contribution: small ones are lost (256 + 1 - 256 is 0 in "
                  "bfloat16), whatever reduce_dtype is. Set grad_dtype to FSDP_FLOAT32 in fsdp_model_options or "
                  "fsdp_group_options; setting it to the parameter's dtype keeps these sums without this warning",
                  runtime_.context.rank(), group.name(), found->name, dtype_name(found->dtype),
                  group.spec->strategy == FSDP_STRATEGY_OPTIM      ? "FSDP_STRATEGY_OPTIM"
                  : group.spec->strategy == FSDP_STRATEGY_NO_SHARD ? "FSDP_STRATEGY_NO_SHARD"
                                                                   : "FSDP_REDUCE_POLICY_LAST"));
}

// Do the last sums of the part stay in their buffer, because the outer axis adds them next? The sums of a group with
// several parts go to the file, and come back together.
bool Reducer::stays_for_outer(const GradPart &part, bool last) const {
  const Outer *outer = runtime_.comms_of(*part.group).outer.get();
  return last && outer && !outer->sums_each() && part.group->parts.size() == 1;
}

// `reduced` is the event of the part that was reduced last. It is NULL if another call reduced that part, because a
// capture may not use events of other calls. `stays`: are the sums in their buffer?
void Reducer::sum_outer(Group &group, const device::Event *reduced, bool stays) {
  if (!reduced) {
    runtime_.comms_of(group).reducing.stream->record(*group.parts.front().reduced);
    reduced = group.parts.front().reduced.get();
  }
  const MeshComms &comms = runtime_.comms_of(group);
  const bool at_home = std::ranges::any_of(group.parts, &GradPart::at_home);
  uint32_t turn = group.parts.front().turn;
  if (at_home && !stays) {
    turn = comms.grad_home->next_turn();
    comms.grad_home->open(group.parts, turn, true, comms.outer->stream());
  }
  comms.outer->reduce_group(group, turn, *reduced, runtime_.step.version());
  if (at_home) comms.grad_home->send(group.parts, turn, *group.grad.summed);
}

// Chooses the buffer in which the part's sums are made.
uint32_t Reducer::take_turn(GradPart &part) {
  const MeshComms &comms = runtime_.comms_of(*part.group);
  device::Stream &stream = *comms.reducing.stream;
  uint32_t turn = comms.outer ? comms.outer->take_turn(part, stream) : 0;
  if (!part.at_home) return turn;
  if (!part.partial) turn = comms.grad_home->next_turn();
  comms.grad_home->open({&part, 1}, turn, part.group->grad.reduced_count > 0, stream);
  return turn;
}

void Reducer::reduce_part(GradPart &part, bool last) {
  const MeshComms &comms = runtime_.comms_of(*part.group);
  device::Stream &stream = *comms.reducing.stream;
  wait_for_writers(part);
  // The update of the previous step may still read the main grads.
  runtime_.join_window(stream);
  if (runtime_.records_calls() && (comms.communicates || comms.outer))
    runtime_.record_call({CallKind::reduce, part.number});
  part.turn = take_turn(part);
  if (comms.communicates)
    enqueue(part, part.turn);
  else
    enqueue_local(part, part.turn);
  stream.record(*part.reduced);
  const bool sums_each = comms.outer && comms.outer->sums_each();
  if (sums_each)
    comms.outer->reduce_part(part, part.turn, part.partial && part.group->grad.reduced_count > 0,
                             runtime_.step.version());
  if (part.at_home && !stays_for_outer(part, last))
    comms.grad_home->send({&part, 1}, part.turn, part.partial ? *part.group->grad.summed : *part.reduced);
  part.given = true;
  part.stage = GradStage::reducing;
  set_access(part, Access::read);
  if (!part.group->plan->persistent_grad) pool_.reducing.push_back(part.number);
}

void Reducer::end_contribution(Group &group) {
  Contribution &grad = group.grad;
  grad.open = false;
  std::fill(grad.acquired.begin(), grad.acquired.end(), uint8_t{0});
  std::fill(grad.completed.begin(), grad.completed.end(), uint8_t{0});
  for (GradPart &part : group.parts) {
    part.given = false;
    part.complete_count = 0;
  }
}

void Reducer::enqueue(GradPart &part, uint32_t turn) {
  const transport::Tag tag{part.number, part.name.c_str(), nullptr, runtime_.reduce_note};
  const bool accumulate = part.group->grad.reduced_count > 0 && !part.partial;
  Stats &stats = runtime_.stats;
  ++stats.reduces;
  stats.reduced_bytes += part.reduced_bytes;
  const char *name = part.everywhere ? "all_reduce" : "reduce_scatter";
  const uint64_t bytes = part.everywhere ? part.all_reduced_bytes : part.reduced_bytes;
  const MeshComms &comms = runtime_.comms_of(*part.group);
  // If peers are late, the transport gives the stream back. Then the stream's thread does the sum.
  const device::BorrowedStream borrowed(*comms.reducing.stream, bytes <= short_reduce);
  std::optional<WaitSpan> exposed;
  if (borrowed) exposed.emplace(runtime_, WaitKind::reduce, part.group);
  comms.reducing.trace->begin(name, part, bytes);
  part.ticket = comms.reduces->sum(part.sums[turn], accumulate, tag, *comms.reducing.stream);
  ++(part.everywhere ? stats.all_reduces : stats.reduce_scatters);
  (part.everywhere ? stats.all_reduce_bytes : stats.reduce_scatter_bytes) += bytes;
  comms.reducing.trace->end(name, part, bytes, runtime_.step.version(), *comms.reduces);
}

// Reduces where the inner axis has one rank: a copy with an explicit scale.
void Reducer::enqueue_local(GradPart &part, uint32_t turn) {
  const bool accumulate = part.group->grad.reduced_count > 0 && !part.partial;
  const CollectiveStream &reducing = runtime_.comms_of(*part.group).reducing;
  reducing.trace->begin("local_sum", part, part.reduced_bytes);
  for (const transport::Sum &sum : part.sums[turn])
    reducing.stream->rank_sum({sum.from.of(0), 0, 1, sum.dtype, sum.wire, sum.to.floats(), sum.count, sum.factor,
                               accumulate, sum.to.own == sum.from.own, sum.results_bytes});
  reducing.trace->end("local_sum", part, part.reduced_bytes, runtime_.step.version());
}

// If there is an outer axis, the main grads of no_shard groups are summed slot by slot, and this makes them whole. It
// is enqueued after the last reduce, so that sums of that reduce do not wait for it.
void Reducer::gather_whole() {
  for (Group &group : runtime_.groups) {
    const MeshComms &comms = runtime_.comms_of(group);
    if (!comms.outer || group.whole_grads.empty() || !group.trained()) continue;
    comms.outer->gather_grads(group, runtime_.step.version());
    if (!comms.communicates) continue;
    comms.reducing.stream->wait(*group.grad.summed);
    comms.reducing.trace->begin("all_gather", group, group.reduced_bytes);
    comms.reduces->gather(group.whole_grads, {group.index, group.name(), nullptr, runtime_.reduce_note},
                          *comms.reducing.stream);
    comms.reducing.trace->end("all_gather", group, group.reduced_bytes, runtime_.step.version(), *comms.reduces);
    ++runtime_.stats.all_gathers;
  }
}

void Reducer::end_groups(fsdp_stream stream) {
  for (size_t g = runtime_.groups.size(); g-- > 0;) {
    Group &group = runtime_.groups[g];
    if (!group.trained() || group.grad.last) continue;
    if (group.grad.given_count)
      end_group(group);
    else
      give_zeros(group, stream);
  }
}

// Ends the contributions of a group. They are now in the main grads, except for work that waits for the last
// contribution: the sums over the outer axis, and the reduce of persistent gradients, which comes after all writes to
// them.
void Reducer::end_group(Group &group) {
  group.grad.last = true;
  if (group.plan->persistent_grad) {
    for (GradPart &part : group.parts) {
      part.streams.clear();
      runtime_.comms_of(group).reducing.stream->wait(*part.opened);
    }
    reduce_parts(group, true);
    return end_contribution(group);
  }
  if (const Outer *outer = runtime_.comms_of(group).outer.get(); outer && !outer->sums_each())
    sum_outer(group, nullptr, false);
}

// Gives zeros for all parameters, from the last to the first, and completes each immediately. The gradient pool was
// planned for this order.
void Reducer::give_zeros(Group &group, fsdp_stream stream) {
  for (uint64_t i = group.places.size(); i-- > 0;) {
    if (!runtime_.param(group, i).has_gradient()) continue;
    put(group, i, nullptr, 0, 0, 0, stream);
    complete(group, i, stream);
  }
  reduce(group, FSDP_LAST, stream);
}

std::string Reducer::list_missing(bool ends_groups) const {
  std::string text;
  const auto add = [&](const Group &group, const char *what) {
    text += format_text("{}group '{}' {}", text.empty() ? "" : "; ", group.name(), what);
  };
  for (const Group &group : runtime_.groups) {
    if (!group.trained()) continue;
    if (group.grad.open)
      add(group, "has gradients that were acquired but not reduced: call fsdp_reduce_grad");
    else if (ends_groups)
      continue;
    else if (group.grad.given_count == 0)
      add(group, "was not reduced: call fsdp_reduce_grad");
    else if (!group.grad.last)
      add(group, "was reduced without FSDP_LAST");
  }
  return text;
}

uint64_t Reducer::count_reduces() const noexcept {
  uint64_t count = 0;
  for (const Group &group : runtime_.groups)
    if (group.trained() && !group.plan->persistent_grad) count += group.grad.given_count;
  return count;
}

void Reducer::start_step() {
  for (Group &group : runtime_.groups) {
    Contribution &grad = group.grad;
    end_contribution(group);
    grad.reduced_count = grad.given_count = 0;
    grad.last = false;
    std::fill(grad.touched.begin(), grad.touched.end(), uint8_t{0});
    std::fill(grad.given.begin(), grad.given.end(), uint8_t{0});
  }
  for (GradPart &part : runtime_.parts) {
    part.stage = GradStage::idle;
    set_access(part, Access::none);
  }
  pool_.reducing.clear();
  runtime_.stats.pending_grads = pool_.live = 0;
}

// For callers that do not wait for peers, these functions find out whether full gradient buffers can be lent now. They
// change nothing.

// Would drain() return at once?
bool Reducer::is_drained(const GradPart &part) const {
  const MeshComms &comms = runtime_.comms_of(*part.group);
  if (!comms.communicates || !runtime_.collectives().releases_tickets) return part.reduced->done();
  const transport::Collectives &comm = *comms.reduces;
  return comm.released(part.ticket) && (!comm.broken() || part.reduced->done());
}

// Checks the parts one after the other, with the effects that acquire() and make_room() would have on each. A GPU
// stream waits by itself, so nothing is checked for it.
void Reducer::check_drained(Group &group, uint64_t first, uint64_t end, const device::Stream &caller,
                            const char *call) {
  if (!caller.is_calling_thread() || group.plan->persistent_grad) return;
  if (end == first + 1) check_room({&group.part_of(first), 1}, call);
  std::ranges::fill(effects_, AcquireEffect());
  uint32_t live = pool_.live;
  const auto drain = [&](const GradPart &reduced, const GradPart &part) {
    if (reduced.stage != GradStage::reducing || std::exchange(effects_[reduced.number].drain, true)) return;
    if (!is_drained(reduced)) refuse_wait(part, reduced, call);
    --live;
  };
  for (uint64_t i = first; i < end; ++i) {
    if (!runtime_.param(group, i).has_gradient()) continue;
    const GradPart &part = group.part_of(i);
    if (part.stage == GradStage::lent || std::exchange(effects_[part.number].open, true)) continue;
    drain(part, part);
    for (auto oldest = pool_.reducing.begin(); live >= max_live_ && oldest != pool_.reducing.end(); ++oldest)
      drain(runtime_.parts[*oldest], part);
    for (const uint32_t number : part.overlaps) drain(runtime_.parts[number], part);
    ++live;
  }
}

void Reducer::refuse_wait(const GradPart &part, const GradPart &reduced, const char *call) const {
  fail(FSDP_BUSY,
       "{}: group '{}' needs a full gradient buffer, and peers have not read that of group '{}' yet; try again "
       "later, or without FSDP_GRAD_NO_WAIT to wait for them",
       call, part.name, reduced.name);
}

// Debug mode finds writes into a gradient that was given back. If memory can be protected, such a write faults.
// Otherwise the buffer is filled with 0xFF when it becomes free, and checked when it is lent again and when the step
// ends.

namespace {

constexpr unsigned char pattern = 0xFF;  // NaN in every dtype

bool is_untouched(device::Device &device, const std::byte *data, fsdp_dtype dtype, uint64_t count) {
  constexpr uint64_t piece_bytes = uint64_t{1} << 20;
  const uint64_t step = piece_bytes / dtype_size(dtype);
  std::vector<std::byte> piece(std::min(piece_bytes, count * dtype_size(dtype)));
  for (uint64_t first = 0; first < count; first += step) {
    const uint64_t now = std::min(step, count - first);
    device.transfer(piece.data(), dtype, data + first * dtype_size(dtype), dtype, now);
    const auto end = piece.begin() + static_cast<std::ptrdiff_t>(now * dtype_size(dtype));
    if (std::any_of(piece.begin(), end, [](std::byte byte) { return byte != std::byte{pattern}; })) return false;
  }
  return true;
}

}  // namespace

// Nothing is checked in a capture, because the gradients are not written yet.
void Reducer::hide(GradPart &part, device::Stream &caller) {
  if (!runtime_.context.debug() || !part.group->plan->trainable) return;
  if (runtime_.storage->protects_grads(part.plan->full_grad.mesh)) return set_access(part, Access::none);
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    const Plane &full_grad = bucket.plane(PlaneKind::full_grad);
    caller.fill(full_grad.data, pattern, bucket.plan->layout.full_count * dtype_size(full_grad.dtype()));
  }
  caller.record(*part.hidden);
  part.is_hidden = runtime_.capture_id == 0;
}

bool Reducer::written_late(GradPart &part) {
  if (!part.is_hidden || runtime_.capture_id) return false;
  part.is_hidden = false;
  device::Device &device = runtime_.context.device();
  device.synchronize(*part.hidden);
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    const Plane &full_grad = bucket.plane(PlaneKind::full_grad);
    if (!is_untouched(device, full_grad.data, full_grad.dtype(), bucket.plan->layout.full_count)) return true;
  }
  return false;
}

// The step has all sums, so transient buffers are no longer needed. Persistent ones may be the main grads.
void Reducer::hide_grads(device::Stream &caller) {
  for (GradPart &part : runtime_.parts)
    if (!part.group->plan->persistent_grad) hide(part, caller);
}

std::string Reducer::list_late_writes() {
  std::string text;
  for (GradPart &part : runtime_.parts)
    if (written_late(part)) text += format_text("{}{}", text.empty() ? "" : "; ", describe_late_write(part));
  return text;
}

std::string Reducer::describe_late_write(const GradPart &part) const {
  return format_text("a kernel wrote into the gradients of group '{}' after {}", part.name,
                     runtime_.spec.max_pending_bytes ? "fsdp_complete_grad or fsdp_reduce_grad" : "fsdp_reduce_grad");
}

void Reducer::forget_hidden() noexcept {
  for (GradPart &part : runtime_.parts) part.is_hidden = false;
}

}  // namespace fsdp::engine
