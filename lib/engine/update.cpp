// SPDX-License-Identifier: Apache-2.0
// The end of a step. When all have met to finish, nobody holds weights and no gradient buffer is being read: the update
// window may open.
#include "engine/update.h"

#include <utility>

#include "base/dtype.h"

namespace fsdp::engine {

// Everything this rank has enqueued ends: completed, or given up because a peer does not take part.
void UpdateWindow::end_step(Meetings::Arrival call, device::Stream &caller) {
  gatherer_.drop_all(false);
  if (runtime_.collectives().rounds_end_with_steps) {
    runtime_.reduces.comm->quiesce();
    if (runtime_.outer) runtime_.outer->sum_comm().quiesce();
  }
  await_readers(caller);
  runtime_.wait_idle(caller);
  auto broken = runtime_.reduces.comm->broken();
  if (!broken && runtime_.outer) broken = runtime_.outer->sum_comm().broken();
  if (!broken) broken = runtime_.gathers.comm->broken();
  if (broken) {
    if (call.missing.empty()) call.blamed = broken->rank;
    call.missing += format_text("{}{}", call.missing.empty() ? "" : "; ", broken->message);
  }
  call.capture = graphs_.number();
  meetings_.meet(call);
  meetings_.check(call.intent);
  runtime_.calls.restart();
  realign();
  runtime_.leave_window(caller);
}

// Weights that are kept in place are read by streams of the caller's, of which this is the only word.
void UpdateWindow::await_readers(device::Stream &caller) {
  runtime_.join_window(caller);
  for (Group &group : runtime_.groups)
    for (GatherSlot &slot : group.slots)
      if (!group.plan->copies) slot.left.for_each([&](const device::Event &event) { caller.wait(event); });
}

void UpdateWindow::finish_grads(double scale, uint32_t flags, fsdp_stream stream, const StepNumbers &numbers) {
  constexpr auto call = "fsdp_finish_grads";
  const CallSpan span(runtime_, "finish_grads");
  runtime_.step.require_weights(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  std::string missing = reducer_.list_missing(flags & FSDP_LAST);
  if (const std::string holds = gatherer_.list_holds(); !holds.empty())
    missing += (missing.empty() ? "" : "; ") + holds;
  if (const std::string late = reducer_.list_late_writes(); !late.empty())
    missing += (missing.empty() ? "" : "; ") + late;
  if (missing.empty() && (flags & FSDP_LAST)) reducer_.end_groups(stream);
  if (missing.empty()) reducer_.gather_whole();
  if (!graphs_.capture()) checkpoints_.await_copied();
  end_step({.intent = Intent::finish,
            .value = scale,
            .missing = std::move(missing),
            .numbers = numbers,
            .reduces = reducer_.count_reduces(),
            .given = given_.hash(),
            .flags = flags},
           caller);
  open_with_grads(caller);
  optimizer_.multiply_grads(scale, caller);
}

// Where ranks have given different parameters a gradient, they tell each other before a step depends on it.
void UpdateWindow::open_with_grads(device::Stream &caller) {
  if (given_.any() && !meetings_.all_gave_alike()) given_.share();
  runtime_.step.open_window(true);
  gatherer_.show_whole(false);
  reducer_.hide_grads(caller);
  reducer_.clear_untrained_sums(caller);
  if (given_.any()) optimizer_.list_spans();
}

void UpdateWindow::begin(fsdp_stream stream) {
  constexpr auto call = "fsdp_begin_update";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "begin_update");
  runtime_.step.require_weights(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  checkpoints_.await_copied();
  end_step({.intent = Intent::update, .missing = list_unfinished()}, caller);
  runtime_.step.open_window(false);
  gatherer_.show_whole(false);
}

std::string UpdateWindow::list_unfinished() const {
  if (runtime_.step.failed()) return "a step that failed and was not discarded";
  if (const std::string holds = gatherer_.list_holds(); !holds.empty()) return holds;
  for (const Group &group : runtime_.groups)
    if (group.grad.open || group.grad.given_count)
      if (!runtime_.step.window_open())
        return format_text("group '{}' has gradients of an unfinished step", group.name());
  return {};
}

void UpdateWindow::require_between_steps(const char *call) const {
  runtime_.step.require_unfailed(call);
  if (runtime_.step.window_has_grads())
    fail(FSDP_INVALID_STATE,
         "{}: the update window has the gradients of a step; call fsdp_step_adamw, fsdp_publish_weights or "
         "fsdp_discard_step first",
         call);
  for (const Group &group : runtime_.groups)
    if (group.grad.open || group.grad.given_count)
      fail(FSDP_INVALID_STATE,
           "{}: group '{}' has gradients of a step that has not ended; call it before the first gradient of a step is "
           "acquired",
           call, group.name());
}

device::Stream &UpdateWindow::require_measurable(fsdp_stream stream, const char *call) {
  runtime_.require_eager(call);
  require_grads(call);
  return runtime_.caller_stream(stream, call);
}

void UpdateWindow::capture_norm(bool waits, const char *call) {
  Capture *const capture = graphs_.capture();
  if (!capture) return runtime_.require_eager(call);
  if (waits)
    fail(FSDP_INVALID_STATE,
         "{}: the model is being captured into a graph, and no host waits for a norm in it: give NULL for norm and for "
         "the mesh; fsdp_get_last_norm tells it after a replay",
         call);
  capture->add_norm(call);
}

device::Stream &UpdateWindow::require_norm(fsdp_stream stream, bool waits, const char *call) {
  require_grads(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  capture_norm(waits, call);
  return caller;
}

void UpdateWindow::require_adamw(const char *call) const {
  if (!adamw_)
    fail(FSDP_INVALID_STATE, "{}: the model was created with FSDP_OPTIMIZER_CALLER and has no AdamW states", call);
}

void UpdateWindow::step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream) {
  constexpr auto call = "fsdp_step_adamw";
  const CallSpan span(runtime_, "step_adamw");
  require_grads(call);
  require_adamw(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  runtime_.storage->restore_all();
  // Before a weight is touched: if a rank discards this step instead, all of them still can.
  meetings_.meet(
      {.intent = Intent::step, .value = lr, .numbers = optimizer_.numbers(options), .capture = graphs_.number()});
  meetings_.check(Intent::step);
  if (Capture *const capture = graphs_.capture()) {
    capture->add_step(options);
    optimizer_.step_adamw_captured(caller);
  } else {
    optimizer_.step_adamw(lr, options, caller);
  }
  close_window(caller);
}

void UpdateWindow::apply_grads(const Strided<fsdp_grad> &grads, double lr, double max_norm,
                               const fsdp_adamw_options &options, fsdp_stream stream, double *norm) {
  constexpr auto call = "fsdp_apply_grads";
  const CallSpan span(runtime_, "apply_grads");
  runtime_.step.require_weights(call);
  require_adamw(call);
  runtime_.caller_stream(stream, call);
  if (max_norm > 0 || norm) capture_norm(norm != nullptr, call);
  check_grads(grads, call);
  reducer_.check_takes_all(call);
  put_grads(grads, stream);
  // Known before anything is scaled, and before one rank asks for a norm that the others do not come for.
  StepNumbers numbers;
  numbers.max_norm = max_norm;
  numbers.asks_norm = max_norm > 0 || norm;
  finish_grads(1.0, 0, stream, numbers);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  double found = 0;
  if (max_norm > 0)
    optimizer_.clip_grads(nullptr, max_norm, caller, norm ? &found : nullptr);
  else if (norm)
    optimizer_.grad_norm(nullptr, caller, &found);
  step_adamw(lr, options, stream);
  if (norm) *norm = found;
}

// In backward order, as a backward pass would give them, each complete at once: what the gradient pool was planned for.
void UpdateWindow::put_grads(const Strided<fsdp_grad> &grads, fsdp_stream stream) {
  uint64_t end = grads.size();
  for (size_t g = runtime_.groups.size(); g-- > 0;) {
    Group &group = runtime_.groups[g];
    uint64_t own = 0;
    for (const auto &param : group.spec->params) own += !param.frozen();
    uint64_t next = end;
    end -= own;
    for (uint64_t i = group.spec->params.size(); i-- > 0;) {
      if (group.spec->params[i].frozen()) continue;
      const fsdp_grad grad = grads[--next];
      if (!group.spec->params[i].trained) continue;
      reducer_.put(group, i, grad.data, grad.dtype, grad.element_count, 0, stream);
      reducer_.complete(group, i, stream);
    }
    reducer_.reduce(group, FSDP_LAST, stream);
  }
}

// All of them before the first is put: a bad call leaves the step as it was.
void UpdateWindow::check_grads(const Strided<fsdp_grad> &grads, const char *call) const {
  uint64_t expected = 0;
  for (const auto &group : runtime_.spec.groups)
    for (const auto &param : group.params) {
      if (param.frozen()) continue;
      const uint64_t index = expected++;
      if (index >= grads.size()) continue;
      const fsdp_grad grad = grads[index];
      if (grad.reserved)
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}].reserved is {:#x}, it must be 0", call, index, grad.reserved);
      if (const auto byte = grads.unknown_byte(index))
        fail(FSDP_UNSUPPORTED, "{}: byte {} of grads[{}] is not zero, but this release knows only the first {} bytes",
             call, *byte, index, sizeof grad);
      if (!grad.data) continue;
      if (!param.trained)
        fail(FSDP_INVALID_STATE,
             "{}: grads[{}] is parameter '{}', which is not trained now: give data NULL for it, or call "
             "fsdp_set_param_trainable between steps",
             call, index, param.name);
      if (grad.element_count != param.element_count)
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}] is parameter '{}' with {} elements, element_count is {}", call,
             index, param.name, param.element_count, grad.element_count);
      if (!is_number(grad.dtype))
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}].dtype: {} is not a dtype", call, index, grad.dtype);
    }
  if (grads.size() != expected)
    fail(FSDP_INVALID_ARGUMENT, "{}: grad_count is {}, the model has {} trainable parameters", call, grads.size(),
         expected);
}

}  // namespace fsdp::engine
