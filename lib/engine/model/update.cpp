// SPDX-License-Identifier: Apache-2.0
// The end of a step. When all ranks have met to finish, no rank holds weights and no gradient buffer is being read, so
// the update window may open.

#include "engine/model/update.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/dtype.h"
#include "engine/model/file_work.h"

namespace fsdp::engine {

namespace {

// If callers have written main weights on only some ranks, no version can be trusted, and the job cannot go on.
Error make_fatal(Error error) {
  constexpr std::string_view advice = "; call fsdp_discard_step on every rank to go on";
  error.status = FSDP_MISMATCH;
  if (error.message.ends_with(advice)) error.message.resize(error.message.size() - advice.size());
  error.message += "; main weights may have been written here, so the context has failed";
  return error;
}

}  // namespace

// Makes errors of the body fatal once main weights or states may have been written, because fsdp_discard_step cannot
// undo such writes.
template <class Body>
void UpdateWindow::run_in_window(Body &&body) {
  try {
    body();
  } catch (const Error &error) {
    if (!runtime_.step.version() || !runtime_.step.failed() || find_written().empty()) throw;
    const Error fatal = make_fatal(error);
    runtime_.context.fail_for_good(fatal, false);
    throw fatal;
  }
}

// Says what was written in this window and cannot be restored; empty if nothing was.
std::string UpdateWindow::find_written() const {
  std::string written = matrices_.find_written();
  return written.empty() ? chunks_.find_written() : written;
}

void UpdateWindow::check_window(Intent intent) {
  run_in_window([&] { meetings_.check(intent); });
}

// Waits until all work that this rank has enqueued is complete, or given up because a peer does not take part.
void UpdateWindow::end_step(Meetings::Arrival call, device::Stream &caller) {
  gatherer_.drop_all(false);
  if (runtime_.collectives().step_ends_round) {
    for (const MeshComms &mesh_comms : runtime_.comms) {
      mesh_comms.reduces->quiesce();
      if (mesh_comms.outer) mesh_comms.outer->sum_comm().quiesce();
    }
  }
  await_readers(caller);
  call.capture = graphs_.number();
  call.again = runtime_.compares_reduces();
  if (call.again) compare_reduces(call, caller);
  runtime_.wait_idle(caller);
  if (const auto broken = find_broken()) {
    if (call.missing.empty()) call.blamed = broken->rank;
    call.missing += format_text("{}{}", call.missing.empty() ? "" : "; ", broken->message);
  }
  meetings_.meet(call);
  meetings_.check(call.intent);
  runtime_.await_file();
  runtime_.calls.restart();
  realign();
  runtime_.leave_window(caller);
}

// Meets before waiting for the streams, so that all ranks report the first reduce that differs, and not the broken
// round that it may cause.
void UpdateWindow::compare_reduces(Meetings::Arrival call, device::Stream &caller) {
  call.again = false;
  meetings_.meet(call);
  try {
    meetings_.check(call.intent);
  } catch (const Error &) {
    runtime_.abandon();
    runtime_.wait_idle(caller);
    throw;
  }
}

// Returns the error of a collective of this round that did not complete.
std::optional<Error> UpdateWindow::find_broken() const {
  std::optional<Error> broken;
  for (const MeshComms &mesh_comms : runtime_.comms) {
    if (!broken) broken = mesh_comms.reduces->broken();
    if (!broken && mesh_comms.outer) broken = mesh_comms.outer->sum_comm().broken();
    if (!broken) broken = mesh_comms.gathers->broken();
  }
  return broken;
}

// Waits for the caller's streams that read weights in place. Only the returned holds tell when these reads are done.
void UpdateWindow::await_readers(device::Stream &caller) {
  runtime_.join_window(caller);
  for (Group &group : runtime_.groups)
    for (GatheredPiece &slot : group.slots)
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

// If ranks have gradients for different parameters, they exchange the difference before a step depends on it.
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
  if (runtime_.step.collected()) return "matrices that were collected and not returned";
  if (runtime_.step.gives_chunks()) return "chunks of shards that were given and not all written";
  if (const std::string holds = gatherer_.list_holds(); !holds.empty()) return holds;
  for (const Group &group : runtime_.groups)
    if (group.grad.open || group.grad.given_count)
      if (!runtime_.step.window_open())
        return format_text("group '{}' has gradients of an unfinished step", group.name());
  return {};
}

void UpdateWindow::require_between_steps(const char *call) const {
  runtime_.step.require_unfailed(call);
  runtime_.step.require_returned(call);
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

device::Stream &UpdateWindow::require_readable(fsdp_stream stream, const char *call) {
  runtime_.require_eager(call);
  runtime_.step.require_unfailed(call);
  runtime_.step.require_returned(call);
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

void UpdateWindow::require_adamw_alone(const char *call) const {
  for (const Group &group : runtime_.groups)
    for (const memory::ParamSpec &param : group.spec->params)
      if (param.by_caller() && param.has_gradient())
        fail(FSDP_INVALID_STATE,
             "{}: the caller updates parameter '{}' of group '{}' (FSDP_OPTIMIZER_CALLER), and this call would publish "
             "it as it is; use fsdp_finish_grads, update the parameter, and then fsdp_step_adamw",
             call, param.name, group.name());
}

void UpdateWindow::step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream) {
  constexpr auto call = "fsdp_step_adamw";
  const CallSpan span(runtime_, "step_adamw");
  require_grads(call);
  require_adamw(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  runtime_.storage->restore_all();
  // The meeting comes before any weight is changed. If a rank discards the step instead, all ranks still can.
  meetings_.meet(
      {.intent = Intent::step, .value = lr, .numbers = optimizer_.numbers(options), .capture = graphs_.number()});
  check_window(Intent::step);
  if (Capture *const capture = graphs_.capture()) {
    capture->add_step(options);
    optimizer_.step_adamw_captured(caller);
  } else {
    run_on_file(runtime_, call, [&] { optimizer_.step_adamw(lr, options, caller); });
  }
  close_window(caller);
}

void UpdateWindow::apply_grads(const Strided<fsdp_grad> &grads, double lr, double max_norm,
                               const fsdp_adamw_options &options, fsdp_stream stream, double *norm) {
  constexpr auto call = "fsdp_apply_grads";
  const CallSpan span(runtime_, "apply_grads");
  runtime_.step.require_weights(call);
  require_adamw(call);
  require_adamw_alone(call);
  runtime_.caller_stream(stream, call);
  if (max_norm > 0 || norm) capture_norm(norm != nullptr, call);
  check_grads(grads, call);
  reducer_.check_takes_all(call);
  put_grads(grads, stream);
  // Ranks must know a difference before anything is scaled, and before one rank waits for a norm that others do not
  // request.
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

// Puts the gradients in the order of a backward pass and completes each immediately. The gradient pool was planned for
// this order.
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

// Checks all gradients before putting the first one, so that a wrong call leaves the step as it was.
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

// ---- whole matrices ----

void UpdateWindow::collect_matrices(const char *source, const char *target, fsdp_dtype dtype, fsdp_stream stream) {
  constexpr auto call = "fsdp_collect_matrices";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "collect_matrices");
  runtime_.step.require_window(call);
  runtime_.step.require_returned(call);
  matrices_.require_matrices(call);
  const MatrixPlanes planes = matrices_.read_planes(source, target, dtype);
  if (planes.has_grads()) runtime_.step.require_grads(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  // If a rank discards the step instead, all ranks still can.
  meetings_.meet({.intent = Intent::collect, .flags = planes.hash()});
  check_window(Intent::collect);
  matrices_.collect(planes, caller);
}

std::optional<GivenMatrices> UpdateWindow::next_matrix(fsdp_stream stream) {
  constexpr auto call = "fsdp_next_matrix";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "next_matrix");
  runtime_.step.require_unfailed(call);
  matrices_.require_collected(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  std::optional<GivenMatrices> given;
  run_in_window([&] { given = matrices_.next(stream, caller); });
  return given;
}

void UpdateWindow::return_matrices(fsdp_stream stream) {
  constexpr auto call = "fsdp_return_matrices";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "return_matrices");
  runtime_.step.require_unfailed(call);
  matrices_.require_collected(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  matrices_.return_rest();
  // All ranks have now enqueued the same work, so the work ends on every device, even if the step is discarded later.
  meetings_.meet({.intent = Intent::give_back});
  check_window(Intent::give_back);
  run_in_window([&] { matrices_.give_back(caller); });
}

// The end of the update window: compute weights are written, the version rises, and readers may read.

void UpdateWindow::publish(fsdp_stream stream) {
  constexpr auto call = "fsdp_publish_weights";
  const CallSpan span(runtime_, "publish_weights");
  runtime_.step.require_window(call);
  runtime_.step.require_returned(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  runtime_.storage->restore_all();  // first, so that a failure leaves nothing half done
  meetings_.meet({.intent = Intent::publish, .capture = graphs_.number()});
  try {
    meetings_.check(Intent::publish);
  } catch (const Error &error) {
    if (!runtime_.step.version() || graphs_.capture()) throw;
    const Error fatal = make_fatal(error);
    runtime_.context.fail_for_good(fatal, false);  // peers that discard would otherwise wait for this rank
    throw fatal;
  }
  runtime_.join_window(caller);
  run_on_file(runtime_, call, [&] { optimizer_.cast_weights(caller); });
  close_window(caller);
}

// Gathers the weights of other outer ranks on the outer streams. Returns the stream after whose work the weights of all
// meshes are complete.
device::Stream &UpdateWindow::gather_outer_weights(device::Stream &caller) {
  device::Stream *last = &caller;
  const auto order = [this](device::Stream &before, device::Stream &after) {
    before.record(*runtime_.marks.order);
    if (!runtime_.marks.order->done()) after.wait(*runtime_.marks.order);
  };
  for (const MeshComms &mesh_comms : runtime_.comms) {
    if (!mesh_comms.outer || !mesh_comms.outer->gathers()) continue;
    device::Stream &stream = mesh_comms.outer->stream();
    order(caller, stream);
    for (Group &group : runtime_.groups)
      if (&runtime_.comms_of(group) == &mesh_comms) mesh_comms.outer->gather_weights(group, runtime_.step.version());
    if (mesh_comms.versions) mesh_comms.versions->publish(runtime_.step.version(), stream);
    if (last != &caller && last != &stream) order(*last, stream);
    last = &stream;
  }
  return *last;
}

// Called when the compute weights are written. Raises the version, so that readers may read.
void UpdateWindow::close_window(device::Stream &caller) {
  gatherer_.show_whole(true);
  const uint64_t version = runtime_.step.raise_version();
  for (const MeshComms &mesh_comms : runtime_.comms)
    if (mesh_comms.versions && !(mesh_comms.outer && mesh_comms.outer->gathers()))
      mesh_comms.versions->publish(version, caller);
  device::Stream &writer = gather_outer_weights(caller);
  writer.record(*runtime_.marks.published);
  if (runtime_.timeline) {
    const uint64_t now = trace::now_ns();
    runtime_.timeline->record({"published", nullptr, now, now, 0, static_cast<uint32_t>(version), trace::caller_lane,
                               trace::EventKind::instant});
  }
  runtime_.step.close_window(runtime_.version_ready());
  matrices_.close();
  chunks_.close();
  optimizer_.close();
  if (!caller.is_calling_thread())
    caller.wait(*runtime_.marks.published);  // if the thread is the stream, await_version() waits
  refresh_whole_weights(caller);
  runtime_.leave_window(caller);
  reducer_.start_step();
  gatherer_.start_step();
}

// Refreshes weights that this rank keeps whole, but of which peers update a part. Copied weights are pulled now. Mapped
// weights are complete once all ranks have published.
void UpdateWindow::refresh_whole_weights(device::Stream &caller) {
  bool any_to_refresh = false;
  std::ranges::fill(awaited_, uint8_t{0});
  for (Group &group : runtime_.groups) {
    MeshComms &comms = runtime_.comms_of(group);
    if (!comms.communicates) {
      any_to_refresh =
          any_to_refresh || (comms.outer && comms.outer->gathers());  // other outer ranks have parts of the weights
      continue;
    }
    const bool only_local = group.spec->strategy == FSDP_STRATEGY_NO_SHARD ||
                            group.plan->compute_region() == memory::RegionId::local_compute;
    if (group.plan->gathers || only_local) continue;
    any_to_refresh = true;
    ++runtime_.stats.gathers;
    if (group.refresh.empty()) continue;
    if (!awaited_[group.spec->mesh]) runtime_.await_parts(comms, "the refresh of whole weights", nullptr);
    awaited_[group.spec->mesh] = 1;
    const Traced traced(group, group.refreshed_planes.traced());
    runtime_.gathers.trace->begin("all_gather", traced, group.refreshed_bytes);
    runtime_.gather(group.refresh, group);
    runtime_.place_call({CallKind::refresh, group.index});
    runtime_.gathers.trace->end("all_gather", traced, group.refreshed_bytes, runtime_.step.version());
    runtime_.stats.add_all_gather(group.refreshed_bytes, group.refreshed_planes);
  }
  if (std::ranges::find(awaited_, 1) != awaited_.end())
    runtime_.wait_idle(*runtime_.gathers.stream, WaitKind::gather, caller);
  if (any_to_refresh) runtime_.await_version();
}

// How all ranks give a step up, and the new round of collectives that begins after any step.

// Ranks that came to finish or to update learn from this meeting that the step is discarded. Their call fails, and they
// come to a second meeting to discard.
void UpdateWindow::discard(fsdp_stream stream) {
  constexpr auto call = "fsdp_discard_step";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "discard_step");
  if (runtime_.step.version() == 0)
    fail(FSDP_INVALID_STATE, "{}: nothing was published yet, so there is no step to discard; call fsdp_publish_weights",
         call);
  if (const std::string written = find_written(); !written.empty()) fail(FSDP_INVALID_STATE, "{}: {}", call, written);
  runtime_.caller_stream(stream, call);
  runtime_.storage->restore_all();  // copied weights are gathered again, too
  await_ended_steps();
  runtime_.abandon();
  gatherer_.drop_all(true);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  runtime_.wait_idle(caller);
  do meetings_.meet({.intent = Intent::discard, .capture = graphs_.number()});
  while (!meetings_.all_came_for(Intent::discard));
  meetings_.check_versions();
  if (runtime_.collectives().step_ends_round) {
    runtime_.calls.restart();
    realign();
  } else {
    end_messages(stream);
  }
  runtime_.await_file();  // the next step uses the same places
  runtime_.step.discard();
  matrices_.close();
  optimizer_.close();
  gatherer_.show_whole(true);
  reducer_.start_step();
  gatherer_.start_step();
  runtime_.context.log(FSDP_LOG_DEBUG, format_text("model {}: the step after version {} was discarded",
                                                   runtime_.number(), runtime_.step.version()));
}

// Waits for work of steps that ended well, and of a norm, which may still be under way on all ranks. The weights, or a
// read of the norm, depend on this work. It ends by itself, so only later work is given up.
void UpdateWindow::await_ended_steps() {
  if (runtime_.collectives().step_ends_round) return;
  const WaitSpan span(runtime_, WaitKind::reduce);
  runtime_.context.device().synchronize(*runtime_.marks.window_work);
  runtime_.context.device().synchronize(*runtime_.marks.norm);
}

// Begins a new round of reduces, so that sequence numbers agree again. Messages of a step that ended well keep their
// numbers, because streams may still use them.
void UpdateWindow::realign() {
  if (!runtime_.collectives().step_ends_round) {
    start_trace_rounds();
    return;
  }
  for (const MeshComms &mesh_comms : runtime_.comms) {
    mesh_comms.reduces->next_round();
    if (mesh_comms.outer) mesh_comms.outer->next_round();
  }
  start_trace_rounds();
}

void UpdateWindow::start_trace_rounds() {
  for (const CollectiveStream &stream : runtime_.reduces) stream.trace->next_round();
  for (const CollectiveStream &stream : runtime_.outers)
    if (stream.trace) stream.trace->next_round();
}

// Called when all ranks give this step up. Some of them may have enqueued work that others have not; such work is given
// up, too, because the streams could not be waited for otherwise. The numbers of messages may be realigned only when
// the streams of all ranks are idle.
void UpdateWindow::end_messages(fsdp_stream stream) {
  bool sound = meetings_.models_are_in_one_order();
  for (const Teams &mesh_teams : runtime_.teams)
    mesh_teams.for_each_data([&](transport::Team &team) { sound = team.ends_alike() && sound; });
  meetings_.say_sound(sound);
  meetings_.meet_again();
  if (!meetings_.all_sound()) {
    for (const Teams &mesh_teams : runtime_.teams) mesh_teams.for_each_data([](transport::Team &team) { team.cut(); });
    for (const Teams &mesh_teams : runtime_.teams)
      mesh_teams.for_each_data([](transport::Team &team) { team.renew(); });
    runtime_.team_news.tell();
  }
  reducer_.await_writers(stream);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  await_readers(caller);
  runtime_.synchronize(caller);
  meetings_.meet_again();
  realign_messages();
}

// Called when nothing is under way. The exchange must be over before the next collective.
void UpdateWindow::realign_messages() {
  for (const MeshComms &mesh_comms : runtime_.comms) {
    mesh_comms.reduces->next_round();
    mesh_comms.gathers->next_round();
    if (mesh_comms.outer) mesh_comms.outer->next_round();
  }
  start_trace_rounds();
  runtime_.calls.restart();
  if (runtime_.model_calls) runtime_.model_calls->restart();
  meetings_.meet_again();
}

}  // namespace fsdp::engine
