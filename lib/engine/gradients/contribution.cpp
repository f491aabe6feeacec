// SPDX-License-Identifier: Apache-2.0
// Lends full gradients to callers: when callers may write them, at which addresses, and on which streams.
#include <algorithm>

#include "base/dtype.h"
#include "engine/gradients/reduce.h"

namespace fsdp::engine {

void Reducer::check_open(const Group &group, uint64_t param_index, const char *call) const {
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (param.frozen())
    fail(FSDP_INVALID_STATE, "{}: parameter '{}' of group '{}' is FROZEN and has no gradient", call, param.name,
         group.name());
  if (!param.trained)
    fail(FSDP_INVALID_STATE,
         "{}: parameter '{}' of group '{}' is not trained now and has no gradient; call fsdp_set_param_trainable "
         "between steps to train it again",
         call, param.name, group.name());
  if (group.grad.last)
    fail(FSDP_INVALID_STATE,
         "{}: group '{}' was already reduced with FSDP_LAST in this step; the next call is fsdp_finish_grads", call,
         group.name());
}

// A parameter may be written until it is complete, even if its part still waits for other parameters.
void Reducer::check_unfinished(const Group &group, uint64_t param_index, const char *call) const {
  if (group.grad.completed[param_index])
    fail(FSDP_INVALID_STATE,
         "{}: the gradient of parameter '{}' of group '{}' was completed in this contribution; the next call for it is "
         "fsdp_reduce_grad",
         call, runtime_.param(group, param_index).name, group.name());
}

void Reducer::check_takes_all(const char *call) const {
  for (const Group &group : runtime_.groups)
    for (uint64_t i = 0; i < group.places.size(); ++i) {
      if (!runtime_.param(group, i).has_gradient() || (!group.grad.last && !group.grad.completed[i])) continue;
      fail(FSDP_INVALID_STATE,
           "{}: the gradient of parameter '{}' of group '{}' was {}, and takes no other now; end the step as it was "
           "begun, or call fsdp_discard_step",
           call, runtime_.param(group, i).name, group.name(),
           group.grad.last ? "reduced with FSDP_LAST in this step" : "completed in this contribution");
    }
}

std::string Reducer::list_lent() const {
  std::string text;
  for (const GradPart &part : runtime_.parts)
    if (part.stage == GradStage::lent && !part.group->plan->persistent_grad)
      text += format_text("{}'{}'", text.empty() ? "" : ", ", part.name);
  return text;
}

void Reducer::open(GradPart &part, device::Stream &caller, const char *call) {
  if (part.stage == GradStage::lent) return;
  if (written_late(part)) fail(FSDP_INVALID_STATE, "{}: {}", call, describe_late_write(part));
  if (!part.group->plan->persistent_grad) make_room(part, caller, call);
  set_access(part, Access::read_write);
  part.stage = GradStage::lent;
  part.streams.clear();
  part.group->grad.open = true;
}

// Waits until the part's buffer may be written. Each stream that writes waits for the reads of the buffer, and does not
// rely on the stream that opened the part.
void Reducer::await_free(GradPart &part, device::Stream &caller) {
  if (caller.is_calling_thread()) return;  // the thread waited when it opened the part
  runtime_.join_window(caller);
  caller.wait(*part.opened);
  if (part.group->plan->persistent_grad) return;
  const auto await = [&](const GradPart &before) {
    caller.wait(*before.reduced);
    caller.wait(*before.hidden);
  };
  await(part);
  for (const uint32_t number : part.overlaps) await(runtime_.parts[number]);
}

// Sets parameters that are not trained to 0, because they have room in the buffer and are summed with it.
void Reducer::clear_untrained(const GradPart &part, device::Stream &caller) {
  const Group &group = *part.group;
  if (group.plan->persistent_grad && group.grad.given_count) return;  // it was cleared for the first contribution
  for (const uint32_t p : part.plan->params) {
    const memory::ParamSpec &param = runtime_.param(group, p);
    if (param.trained) continue;
    const Plane &full_grad = runtime_.bucket(group.places[p]).plane(PlaneKind::full_grad);
    caller.fill(full_grad.element(runtime_.placement(group.places[p]).full_offset), 0,
                param.element_count * dtype_size(full_grad.dtype()));
  }
}

// Clears the sums of untrained parameters. Once is enough, because nothing is reduced into them. All of this rank's
// part is cleared, because the outer axis may add it to other ranks' parts. Clearing in a capture does not count,
// because the work is only recorded.
void Reducer::clear_untrained_sums(device::Stream &caller) {
  if (cleared_) return;
  runtime_.join_window(caller);
  for (const GradPart &part : runtime_.parts) {
    if (part.trained_count()) continue;
    for (const uint32_t b : part.plan->buckets) {
      const Bucket &bucket = runtime_.storage->buckets()[b];
      const Plane &sums = bucket.plane(PlaneKind::grad);
      if (!sums.plan->in_file())
        caller.fill(sums.data, 0, bucket.plan->bytes(*sums.plan, "main grads"));
      else
        clear_in_file(sums, bucket.plan->count(*sums.plan));
    }
  }
  runtime_.leave_window(caller);
  cleared_ = runtime_.capture_id == 0;
}

void Reducer::clear_in_file(const Plane &sums, uint64_t count) const {
  const std::vector<float> zeros(std::min<uint64_t>(count, uint64_t{1} << 18));
  for (uint64_t done = 0; done < count; done += zeros.size())
    runtime_.storage->transfer(sums.fp32(done), FSDP_FLOAT32, zeros.data(), FSDP_FLOAT32,
                               std::min<uint64_t>(zeros.size(), count - done));
}

void Reducer::make_room(GradPart &part, device::Stream &caller, const char *call) {
  if (part.stage == GradStage::reducing) drain(part, caller);
  while (pool_.live >= max_live_) {
    if (pool_.reducing.empty()) refuse_more(part, call);
    drain(runtime_.parts[pool_.reducing.front()], caller);
  }
  for (const uint32_t number : part.overlaps) {
    GradPart &other = runtime_.parts[number];
    if (other.stage == GradStage::reducing) drain(other, caller);
    if (other.stage == GradStage::lent) refuse_shared(part, other, call);
  }
  Stats &stats = runtime_.stats;
  stats.pending_grads = ++pool_.live;
  stats.peak_pending_grads = std::max(stats.peak_pending_grads, stats.pending_grads);
}

void Reducer::refuse_more(const GradPart &part, const char *call) const {
  if (runtime_.spec.max_pending_bytes)
    fail(
        FSDP_INVALID_STATE,
        "{}: '{}' needs a full gradient buffer, but all {} that max_pending_bytes {} and max_pending_groups {} have "
        "room for are lent to {}; call fsdp_complete_grad for the parameters that are written, or fsdp_reduce_grad, or "
        "raise the one of them that bounds it",
        call, part.name, max_live_, runtime_.spec.max_pending_bytes, runtime_.spec.max_pending_groups, list_lent());
  fail(FSDP_INVALID_STATE,
       "{}: group '{}' needs a full gradient buffer, but all {} are lent to {}, which fsdp_reduce_grad has not been "
       "called for; reduce one of them first or raise max_pending_groups",
       call, part.name, max_live_, list_lent());
}

void Reducer::refuse_shared(const GradPart &part, const GradPart &other, const char *call) const {
  if (runtime_.spec.max_pending_bytes)
    fail(FSDP_INVALID_STATE,
         "{}: '{}' needs the gradient buffer that is lent to '{}'; call fsdp_complete_grad for its parameters or "
         "fsdp_reduce_grad for its group first, raise max_pending_bytes, or give fsdp_set_schedule the order of "
         "backward visits in which both are open",
         call, part.name, other.name);
  fail(FSDP_INVALID_STATE,
       "{}: group '{}' needs the gradient buffer that is lent to group '{}'; call fsdp_reduce_grad for '{}' first, or "
       "give fsdp_set_schedule the order of backward visits in which both are open",
       call, part.name, other.name, other.name);
}

// Waits until peers have read the buffer, after which it may be written again.
void Reducer::drain(GradPart &part, device::Stream &caller) {
  const Group *const group = part.group;
  if (const MeshComms &comms = runtime_.comms_of(*part.group);
      comms.communicates && runtime_.collectives().releases_tickets) {
    if (!comms.reduces->released(part.ticket)) {
      const WaitSpan span(runtime_, WaitKind::reduce, group);
      comms.reduces->await_release(part.ticket, caller);
      runtime_.context.failure().check();  // peers also release the buffer when they end
    }
    // A broken round releases the buffer when it ends, but this rank's own stream may still use the buffer.
    if (comms.reduces->broken()) runtime_.wait(*part.reduced, WaitKind::reduce, caller, group);
  } else {
    runtime_.wait(*part.reduced, WaitKind::reduce, caller, group);
  }
  part.stage = GradStage::idle;
  std::erase(pool_.reducing, part.number);
  runtime_.stats.pending_grads = --pool_.live;
  hide(part, caller);
}

LentGrad Reducer::acquire(Group &group, uint64_t param_index, uint32_t flags, fsdp_stream stream, const char *call) {
  const CallSpan span(runtime_, "acquire_grad", &group);
  const ParamPlace &place = runtime_.place(group, param_index, call);
  check_open(group, param_index, call);
  check_unfinished(group, param_index, call);
  runtime_.caller_stream(stream, call);
  check_writers(group, call);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  GradPart &part = group.part_of(param_index);
  if (flags & FSDP_GRAD_NO_WAIT) check_drained(group, param_index, param_index + 1, caller, call);
  open(part, caller, call);
  Contribution &state = group.grad;
  const bool again = state.acquired[param_index];
  const auto wrote = [&](fsdp_stream own) {
    return std::find(part.streams.begin(), part.streams.end(), own) != part.streams.end();
  };
  if (again && state.writers[param_index] != stream && wrote(state.writers[param_index])) {
    // The second writer waits for the first. If the first writer was in a replay, it has no stream here.
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
  state.given[param_index] = 1;
  state.writers[param_index] = stream;
  if (!wrote(stream)) {
    await_free(part, caller);
    if (part.streams.empty()) clear_untrained(part, caller);
    part.streams.push_back(stream);
  }
  if ((flags & FSDP_GRAD_ZEROED) && !lent.accumulate) {
    caller.fill(lent.data, 0, runtime_.param(group, param_index).element_count * dtype_size(dtype));
    lent.accumulate = true;
  }
  return lent;
}

// Checks, before lending any of them, that all full gradients of the group can be lent at once.
void Reducer::check_lends_all(const Group &group, const char *call) const {
  if (!group.lends_all)
    fail(FSDP_INVALID_STATE,
         "{}: the full gradients of group '{}' are {} parts that max_pending_bytes {} has no room for at once; call "
         "fsdp_acquire_grad or fsdp_put_grad and then fsdp_complete_grad for one parameter after the other, the last "
         "one first, or raise max_pending_bytes",
         call, group.name(), group.parts.size(), runtime_.spec.max_pending_bytes);
  for (uint64_t i = 0; i < group.places.size(); ++i) {
    if (!runtime_.param(group, i).has_gradient()) continue;
    check_open(group, i, call);
    check_unfinished(group, i, call);
  }
  check_room(group.parts, call);
}

// Checks that there is a buffer for every part before one is lent. Without this check, parts that were lent before an
// error would look as if they had been written.
void Reducer::check_room(std::span<const GradPart> opened, const char *call) const {
  size_t lent = pool_.live - pool_.reducing.size();
  for (const GradPart &part : opened) {
    if (part.stage == GradStage::lent || part.group->plan->persistent_grad || part.trained_count() == 0) continue;
    if (lent++ >= max_live_) refuse_more(part, call);
    for (const uint32_t number : part.overlaps)
      if (runtime_.parts[number].stage == GradStage::lent) refuse_shared(part, runtime_.parts[number], call);
  }
}

std::span<const LentGrad> Reducer::acquire_all(Group &group, uint32_t flags, fsdp_stream stream, const char *call) {
  check_lends_all(group, call);
  if (flags & FSDP_GRAD_NO_WAIT)
    check_drained(group, 0, group.places.size(), runtime_.context.device().caller_stream(stream), call);
  flags &= ~uint32_t{FSDP_GRAD_NO_WAIT};
  lent_.clear();
  for (uint64_t i = 0; i < group.places.size(); ++i)
    lent_.push_back(!runtime_.param(group, i).has_gradient() ? LentGrad{} : acquire(group, i, flags, stream, call));
  return lent_;
}

void Reducer::put(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                  uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_put_grad";
  const CallSpan span(runtime_, "put_grad", &group, data ? element_count * dtype_size(dtype) : 0);
  runtime_.place(group, param_index, call);
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (data && element_count != param.element_count)
    fail(FSDP_INVALID_ARGUMENT, "{}: parameter '{}' of group '{}' has {} elements, element_count is {}", call,
         param.name, group.name(), param.element_count, element_count);
  if (data && !is_number(dtype)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a dtype", call, dtype);
  const uint8_t given = group.grad.given[param_index];
  const LentGrad lent = acquire(group, param_index, data ? flags : flags | FSDP_GRAD_ZEROED, stream, call);
  if (!data) {
    group.grad.given[param_index] = given;  // zeros do not count as a gradient
    return;
  }
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
    if (!param.has_gradient() || group.grad.acquired[i]) continue;
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
  if (!runtime_.has_graphs) return;
  for (const GradPart &part : group.parts) {
    if (part.stage != GradStage::lent) continue;
    for (const fsdp_stream stream : part.streams)
      if (const uint64_t id = runtime_.context.device().caller_stream(stream).capture_id();
          id != 0 && id != runtime_.capture_id)
        fail(FSDP_INVALID_STATE,
             "{}: a stream that has written gradients of group '{}' is being captured into a graph now, and the model "
             "is not; reduce them first, or call fsdp_begin_capture",
             call, group.name());
  }
}

// The stream to wait for, or NULL. During a capture, writes that streams made before the capture are not part of the
// graph; the replay is ordered after them.
device::Stream *Reducer::writer(fsdp_stream stream) const {
  device::Stream &found = runtime_.context.device().caller_stream(stream);
  return runtime_.capture_id == 0 || found.capture_id() != 0 ? &found : nullptr;
}

void Reducer::wait_for_writers(GradPart &part) {
  for (const fsdp_stream stream : part.streams) {
    device::Stream *const found = writer(stream);
    if (!found) continue;
    device::Event &written = part.written.of(stream);
    found->record(written);
    if (!written.done()) runtime_.comms_of(*part.group).reducing.stream->wait(written);
  }
}

// Orders the next user of the buffer after all streams that wrote into the buffer.
void Reducer::chain_writers(GradPart &part) {
  for (const fsdp_stream stream : part.streams) {
    device::Stream *const found = writer(stream);
    if (!found) continue;
    found->wait(*part.opened);
    found->record(*part.opened);
  }
}

void Reducer::await_writers(fsdp_stream stream) {
  for (GradPart &part : runtime_.parts) {
    if (part.stage != GradStage::lent) continue;
    chain_writers(part);
    runtime_.context.device().caller_stream(stream).wait(*part.opened);
  }
}

}  // namespace fsdp::engine
