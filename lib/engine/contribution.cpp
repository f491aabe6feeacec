// SPDX-License-Identifier: Apache-2.0
// The full gradients that callers write: who may, where, and on which streams.
#include <algorithm>

#include "base/dtype.h"
#include "engine/reduce.h"

namespace fsdp::engine {

void Reducer::check_open(const Group &group, uint64_t param_index, const char *call) const {
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (param.frozen())
    fail(FSDP_INVALID_STATE, "{}: parameter '{}' of group '{}' is FROZEN and has no gradient", call, param.name,
         group.name());
  if (group.grad.last)
    fail(FSDP_INVALID_STATE,
         "{}: group '{}' was already reduced with FSDP_LAST in this step; the next call is fsdp_finish_grads", call,
         group.name());
}

std::string Reducer::list_lent() const {
  std::string text;
  for (const Group &group : runtime_.groups)
    if (group.grad.stage == GradStage::lent && !group.plan->persistent_grad)
      text += format_text("{}'{}'", text.empty() ? "" : ", ", group.name());
  return text;
}

void Reducer::open(Group &group, device::Stream &caller, const char *call) {
  Contribution &grad = group.grad;
  if (grad.stage == GradStage::lent) return;
  if (written_late(group))
    fail(FSDP_INVALID_STATE, "{}: a kernel wrote into the gradients of group '{}' after fsdp_reduce_grad", call,
         group.name());
  if (!group.plan->persistent_grad) make_room(group, caller, call);
  set_access(group, comm::Access::read_write);
  grad.stage = GradStage::lent;
  std::fill(grad.acquired.begin(), grad.acquired.end(), uint8_t{0});
  grad.streams.clear();
}

// Every stream that writes waits for this itself, and not for the stream that came first.
void Reducer::await_free(Group &group, device::Stream &caller) {
  if (caller.is_calling_thread()) return;  // which has waited when it opened the buffer
  runtime_.join_window(caller);
  caller.wait(*group.grad.opened);
  if (group.plan->persistent_grad) return;
  const auto await = [&](const Group &before) {
    caller.wait(*before.grad.reduced);
    caller.wait(*before.grad.hidden);
  };
  await(group);
  for (const uint32_t index : group.grad_overlaps) await(runtime_.groups[index]);
}

void Reducer::make_room(Group &group, device::Stream &caller, const char *call) {
  if (group.grad.stage == GradStage::reducing) drain(group, caller);
  while (pool_.live >= most_live_) {
    if (pool_.reducing.empty())
      fail(
          FSDP_INVALID_STATE,
          "{}: group '{}' needs a full gradient buffer, but all {} are lent to {}, which fsdp_reduce_grad has not been "
          "called for; reduce one of them first or raise max_pending_groups",
          call, group.name(), most_live_, list_lent());
    drain(runtime_.groups[pool_.reducing.front()], caller);
  }
  for (const uint32_t index : group.grad_overlaps) {
    Group &other = runtime_.groups[index];
    if (other.grad.stage == GradStage::reducing) drain(other, caller);
    if (other.grad.stage == GradStage::lent)
      fail(FSDP_INVALID_STATE,
           "{}: group '{}' needs the gradient buffer that is lent to group '{}'; call fsdp_reduce_grad for '{}' first, "
           "or "
           "give fsdp_set_schedule the order of backward visits in which both are open",
           call, group.name(), other.name(), other.name());
  }
  Stats &stats = runtime_.stats;
  stats.pending_grads = ++pool_.live;
  stats.peak_pending_grads = std::max(stats.peak_pending_grads, stats.pending_grads);
}

// Peers have read the buffer: it may be written again.
void Reducer::drain(Group &group, device::Stream &caller) {
  if (runtime_.communicates() && runtime_.collectives().releases_tickets) {
    if (!runtime_.reduces.comm->released(group.grad.ticket)) {
      const WaitSpan span(runtime_, WaitKind::reduce, &group);
      runtime_.reduces.comm->await_release(group.grad.ticket, caller);
      runtime_.context.failure().check();  // a peer's end releases the buffer too
    }
    // So does the end of a round that broke, at once: this rank's own stream may still be at it.
    if (runtime_.reduces.comm->broken()) runtime_.wait(*group.grad.reduced, WaitKind::reduce, caller, &group);
  } else {
    runtime_.wait(*group.grad.reduced, WaitKind::reduce, caller, &group);
  }
  group.grad.stage = GradStage::idle;
  std::erase(pool_.reducing, group.index);
  runtime_.stats.pending_grads = --pool_.live;
  hide(group, caller);
}

LentGrad Reducer::acquire(Group &group, uint64_t param_index, bool zeroed, fsdp_stream stream, const char *call) {
  const CallSpan span(runtime_, "acquire_grad", &group);
  const ParamPlace &place = runtime_.place(group, param_index, call);
  check_open(group, param_index, call);
  runtime_.caller_stream(stream, call);
  check_writers(group, call);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  open(group, caller, call);
  Contribution &state = group.grad;
  const bool again = state.acquired[param_index];
  const auto wrote = [&](fsdp_stream own) {
    return std::find(state.streams.begin(), state.streams.end(), own) != state.streams.end();
  };
  if (again && state.writers[param_index] != stream && wrote(state.writers[param_index])) {
    // The second writer comes after the first, which is none of these if that was in a replay.
    if (device::Stream *first = writer(state.writers[param_index])) {
      first->record(*runtime_.marks.order);
      caller.wait(*runtime_.marks.order);
    }
  }
  const Bucket &bucket = runtime_.bucket(place);
  const layout::Placement &placement = runtime_.placement(place);
  const fsdp_dtype dtype = bucket.plan->grad_dtype;
  LentGrad lent{bucket.plane(PlaneKind::full_grad).element(placement.full_offset), dtype,
                group.plan->persistent_grad ? state.touched[param_index] != 0 : again};
  state.acquired[param_index] = 1;
  state.touched[param_index] = 1;
  state.writers[param_index] = stream;
  if (!wrote(stream)) {
    await_free(group, caller);
    state.streams.push_back(stream);
  }
  if (zeroed && !lent.accumulate) {
    caller.fill(lent.data, 0, runtime_.param(group, param_index).element_count * dtype_size(dtype));
    lent.accumulate = true;
  }
  return lent;
}

std::span<const LentGrad> Reducer::acquire_all(Group &group, bool zeroed, fsdp_stream stream, const char *call) {
  lent_.clear();
  for (uint64_t i = 0; i < group.places.size(); ++i)
    lent_.push_back(runtime_.param(group, i).frozen() ? LentGrad{} : acquire(group, i, zeroed, stream, call));
  return lent_;
}

void Reducer::put(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                  fsdp_stream stream) {
  constexpr auto call = "fsdp_put_grad";
  const CallSpan span(runtime_, "put_grad", &group, data ? element_count * dtype_size(dtype) : 0);
  runtime_.place(group, param_index, call);
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (data && element_count != param.element_count)
    fail(FSDP_INVALID_ARGUMENT, "{}: parameter '{}' of group '{}' has {} elements, element_count is {}", call,
         param.name, group.name(), param.element_count, element_count);
  if (data && !is_number(dtype)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a dtype", call, dtype);
  const LentGrad lent = acquire(group, param_index, !data, stream, call);
  if (!data) return;
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  if (lent.accumulate) {
    caller.add(lent.data, lent.dtype, data, dtype, element_count);
  } else {
    caller.cast(lent.data, lent.dtype, data, dtype, element_count);
  }
}

void Reducer::check_complete(const Group &group) const {
  std::string missing;
  for (size_t i = 0; i < group.places.size(); ++i) {
    const memory::ParamSpec &param = runtime_.param(group, i);
    if (param.frozen() || (group.grad.stage == GradStage::lent && group.grad.acquired[i])) continue;
    missing += format_text("{}'{}'", missing.empty() ? "" : ", ", param.name);
  }
  if (!missing.empty())
    fail(FSDP_INVALID_STATE,
         "fsdp_reduce_grad: group '{}' has no gradient for {}; write it through fsdp_acquire_grad, or call "
         "fsdp_put_grad with "
         "data NULL if there is none",
         group.name(), missing);
}

void Reducer::check_writers(const Group &group, const char *call) const {
  if (!runtime_.has_graphs || group.grad.stage != GradStage::lent) return;
  for (const fsdp_stream stream : group.grad.streams)
    if (const uint64_t id = runtime_.context.device().caller_stream(stream).capture_id();
        id != 0 && id != runtime_.capture_id)
      fail(FSDP_INVALID_STATE,
           "{}: a stream that has written gradients of group '{}' is being captured into a graph now, and the model "
           "is not; reduce them first, or call fsdp_begin_capture",
           call, group.name());
}

// In a capture, what other streams have written before it is no part of the graph: whoever replays it orders that.
device::Stream *Reducer::writer(fsdp_stream stream) const {
  device::Stream &found = runtime_.context.device().caller_stream(stream);
  return runtime_.capture_id == 0 || found.capture_id() != 0 ? &found : nullptr;
}

void Reducer::wait_for_writers(Group &group) {
  for (const fsdp_stream stream : group.grad.streams) {
    device::Stream *const found = writer(stream);
    if (!found) continue;
    device::Event &written = group.grad.written.of(stream);
    found->record(written);
    if (!written.done()) runtime_.reduces.stream->wait(written);
  }
}

// Whoever opens the buffer again comes after all that wrote into it.
void Reducer::chain_writers(Group &group) {
  for (const fsdp_stream stream : group.grad.streams) {
    device::Stream *const found = writer(stream);
    if (!found) continue;
    found->wait(*group.grad.opened);
    found->record(*group.grad.opened);
  }
}

void Reducer::await_writers(fsdp_stream stream) {
  for (Group &group : runtime_.groups) {
    if (group.grad.stage != GradStage::lent) continue;
    chain_writers(group);
    runtime_.context.device().caller_stream(stream).wait(*group.grad.opened);
  }
}

}  // namespace fsdp::engine
