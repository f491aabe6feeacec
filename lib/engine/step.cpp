// SPDX-License-Identifier: Apache-2.0
// The end of a step. When all have met to finish, nobody holds weights and no gradient buffer is being read: the update window
// may open.
#include "base/dtype.h"
#include "engine/capture.h"
#include "engine/meeting.h"
#include "engine/model.h"

namespace fsdp::engine {

// Everything this rank has enqueued ends: completed, or given up because a peer does not take part.
void Model::end_step(Intent intent, double value, std::string missing, device::Stream &caller) {
  Runtime &state = *runtime_;
  gatherer_->drop_all(false);
  if (context_->on_host()) {
    state.reduce_comm->quiesce();
    if (state.outer) state.outer->sum_comm().quiesce();
  } else {
    await_readers(caller);
  }
  state.wait_idle(caller);
  auto broken = state.reduce_comm->broken();
  if (!broken && state.outer) broken = state.outer->sum_comm().broken();
  if (!broken && !context_->on_host()) broken = state.gather_comm->broken();
  if (broken) missing += format_text("{}{}", missing.empty() ? "" : "; ", broken->message);
  meet(intent, value, missing);
  check_meeting(intent, value);
  state.calls.restart();
  realign();
  state.leave_window(caller);
}

// Weights that are kept in place are read by streams of the caller's, of which this is the only word.
void Model::await_readers(device::Stream &caller) {
  Runtime &state = *runtime_;
  state.join_window(caller);
  for (Group &group : state.groups)
    for (GatherSlot &slot : group.slots)
      if (!group.plan->copies) caller.wait(*slot.left);
}

void Model::finish_grads(double scale, fsdp_stream stream) {
  constexpr auto call = "fsdp_finish_grads";
  Runtime &state = runtime(call);
  const CallSpan span(state, "finish_grads");
  state.require_weights(call);
  device::Stream &caller = state.caller_stream(stream, call);
  std::string missing = reducer_->list_missing();
  if (const std::string holds = gatherer_->list_holds(); !holds.empty())
    missing += (missing.empty() ? "" : "; ") + holds;
  if (missing.empty()) reducer_->gather_whole();
  end_step(Intent::finish, scale, std::move(missing), caller);
  state.window_open = state.window_has_grads = true;
  optimizer_->scale_grads(scale, caller);
}

void Model::begin_update(fsdp_stream stream) {
  constexpr auto call = "fsdp_begin_update";
  Runtime &state = runtime(call);
  state.require_eager(call);
  const CallSpan span(state, "begin_update");
  state.require_weights(call);
  device::Stream &caller = state.caller_stream(stream, call);
  std::string missing = unfinished();
  end_step(Intent::update, 1.0, std::move(missing), caller);
  state.window_open = true;
  state.window_has_grads = false;
}

void Model::require_grads(const char *call) {
  Runtime &state = runtime(call);
  state.require_window(call);
  if (!state.window_has_grads)
    fail(FSDP_INVALID_STATE, "{}: there are no gradients in this update window; fsdp_finish_grads opens one that has them", call);
}

device::Stream &Model::require_measurable(fsdp_stream stream, const char *call) {
  runtime(call).require_eager(call);
  require_grads(call);
  return runtime_->caller_stream(stream, call);
}

void Model::require_adamw(const char *call) const {
  if (optimizer_kind_ != FSDP_OPTIMIZER_ADAMW)
    fail(FSDP_INVALID_STATE, "{}: the model was created with FSDP_OPTIMIZER_CALLER and has no AdamW states", call);
}

void Model::step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream, const char *call) {
  const CallSpan span(runtime(call), "step_adamw");
  require_grads(call);
  require_adamw(call);
  device::Stream &caller = runtime_->caller_stream(stream, call);
  // Before a weight is touched: if a rank discards this step instead, all of them still can.
  meet(Intent::step, lr, {});
  check_meeting(Intent::step, lr);
  if (capture_) {
    capture_->add_step(options);
    optimizer_->step_adamw_captured(caller);
  } else {
    optimizer_->step_adamw(lr, options, caller);
  }
  close_window(caller);
}

double Model::apply_grads(const fsdp_grad *grads, uint64_t count, double lr, double max_norm,
                          const fsdp_adamw_options &options, fsdp_stream stream, bool want_norm) {
  constexpr auto call = "fsdp_apply_grads";
  Runtime &state = runtime(call);
  const CallSpan span(state, "apply_grads");
  if (max_norm > 0 || want_norm) state.require_eager(call);
  state.require_weights(call);
  require_adamw(call);
  state.caller_stream(stream, call);
  check_grads(grads, count, call);
  // In backward order, as a backward pass would give them: what the gradient pool was planned for.
  uint64_t end = count;
  for (size_t g = state.groups.size(); g-- > 0;) {
    Group &group = state.groups[g];
    uint64_t own = 0;
    for (const auto &param : group.spec->params) own += !param.frozen();
    uint64_t next = end - own;
    end = next;
    for (uint32_t i = 0; i < group.spec->params.size(); ++i) {
      if (group.spec->params[i].frozen()) continue;
      const fsdp_grad &grad = grads[next++];
      reducer_->put(group, i, grad.data, grad.dtype, grad.element_count, stream);
    }
    reducer_->reduce(group, FSDP_LAST, stream);
  }
  finish_grads(1.0, stream);
  device::Stream &caller = state.caller_stream(stream, call);
  double norm = 0;
  if (max_norm > 0)
    norm = optimizer_->clip_grads(max_norm, caller);
  else if (want_norm)
    norm = optimizer_->grad_norm(caller);
  step_adamw(lr, options, stream, call);
  return norm;
}

// All of them before the first is put: a bad call leaves the step as it was.
void Model::check_grads(const fsdp_grad *grads, uint64_t count, const char *call) const {
  uint64_t expected = 0;
  for (const auto &group : spec_.groups)
    for (const auto &param : group.params) {
      if (param.frozen()) continue;
      const uint64_t index = expected++;
      if (index >= count) continue;
      if (grads[index].reserved)
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}].reserved is {:#x}, it must be 0", call, index, grads[index].reserved);
      if (!grads[index].data) continue;
      if (grads[index].element_count != param.element_count)
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}] is parameter '{}' with {} elements, element_count is {}", call, index,
             param.name, param.element_count, grads[index].element_count);
      if (!dtype_size(grads[index].dtype))
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}].dtype: {} is not a dtype", call, index, grads[index].dtype);
    }
  if (count != expected)
    fail(FSDP_INVALID_ARGUMENT, "{}: grad_count is {}, the model has {} trainable parameters", call, count, expected);
}

}  // namespace fsdp::engine
