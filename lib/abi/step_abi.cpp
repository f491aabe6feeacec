// SPDX-License-Identifier: Apache-2.0
// The calls of a training step: for gathers and gradients, and for the end of the step.

#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"
#include "engine/weights/replicas.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

void check_piece(const engine::Group &group, uint32_t piece, const char *call) {
  if (piece < group.piece_count()) return;
  if (group.piece_count() == 1)
    fail(FSDP_INVALID_ARGUMENT, "{}: piece is {}, but group '{}' has only piece 0; fsdp_param.piece divides a group",
         call, piece, group.name());
  fail(FSDP_INVALID_ARGUMENT, "{}: piece is {}, but group '{}' has the pieces 0 to {}", call, piece, group.name(),
       group.piece_count() - 1);
}

}  // namespace

extern "C" {

fsdp_status fsdp_prefetch(fsdp_group *group, fsdp_phase phase, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_prefetch";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_phase(phase, call);
    check_flags(flags, 0, call, "flags");
    const device::Stream &caller = runtime.caller_stream(stream, call);
    runtime.step.require_weights(call);
    model.context().flight().set_object(impl.flight_name, phase);
    model.gatherer(call).prefetch(impl, phase, caller);
  });
}

fsdp_status fsdp_unshard(fsdp_group *group, fsdp_phase phase, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_unshard";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_phase(phase, call);
    check_flags(flags, 0, call, "flags");
    runtime.step.require_weights(call);
    model.context().flight().set_object(impl.flight_name, phase);
    model.gatherer(call).unshard(impl, engine::Gatherer::whole_group, phase, stream);
  });
}

fsdp_status fsdp_reshard(fsdp_group *group, fsdp_phase phase, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_reshard";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_phase(phase, call);
    check_flags(flags, 0, call, "flags");
    model.context().flight().set_object(impl.flight_name, phase);
    model.gatherer(call).reshard(impl, engine::Gatherer::whole_group, phase, stream);
  });
}

fsdp_status fsdp_unshard_piece(fsdp_group *group, uint32_t piece, fsdp_phase phase, uint32_t flags,
                               fsdp_stream stream) {
  constexpr auto call = "fsdp_unshard_piece";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_piece(impl, piece, call);
    check_phase(phase, call);
    check_flags(flags, 0, call, "flags");
    runtime.step.require_weights(call);
    model.context().flight().set_object(impl.flight_name, phase);
    model.gatherer(call).unshard(impl, piece, phase, stream);
  });
}

fsdp_status fsdp_reshard_piece(fsdp_group *group, uint32_t piece, fsdp_phase phase, uint32_t flags,
                               fsdp_stream stream) {
  constexpr auto call = "fsdp_reshard_piece";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_piece(impl, piece, call);
    check_phase(phase, call);
    check_flags(flags, 0, call, "flags");
    model.context().flight().set_object(impl.flight_name, phase);
    model.gatherer(call).reshard(impl, piece, phase, stream);
  });
}

fsdp_status fsdp_restore_view(fsdp_group *group) {
  constexpr auto call = "fsdp_restore_view";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    model.gatherer(call).restore(impl);
  });
}

fsdp_status fsdp_acquire_grad(fsdp_group *group, uint64_t param_index, uint32_t flags, fsdp_stream stream,
                              fsdp_tensor *grad, int32_t *accumulate) {
  constexpr auto call = "fsdp_acquire_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_output(grad, call, "fsdp_tensor");
    check_flags(flags, FSDP_GRAD_ZEROED | FSDP_GRAD_NO_WAIT, call, "flags");
    if (!(flags & FSDP_GRAD_ZEROED)) check_pointer(accumulate, call, "accumulate");
    runtime.step.require_weights(call);
    const engine::LentGrad lent = model.reducer(call).acquire(impl, param_index, flags, stream);
    if (accumulate) *accumulate = lent.accumulate;
    write_output(grad, view_of(runtime.context, lent.data, runtime.param(impl, param_index).shape, lent.dtype, 0));
  });
}

fsdp_status fsdp_acquire_grads(fsdp_group *group, uint32_t flags, fsdp_stream stream, fsdp_tensor *grads,
                               uint64_t grad_count, uint64_t grad_stride, int32_t *accumulate) {
  constexpr auto call = "fsdp_acquire_grads";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_tensors(impl, grads, grad_count, grad_stride, "grad", call);
    check_flags(flags, FSDP_GRAD_ZEROED | FSDP_GRAD_NO_WAIT, call, "flags");
    if (grad_count && !(flags & FSDP_GRAD_ZEROED)) check_pointer(accumulate, call, "accumulate");
    runtime.step.require_weights(call);
    // All gradients are acquired before any output is written, so that a failure leaves the outputs unchanged.
    const auto lent = model.reducer(call).acquire_all(impl, flags, stream, call);
    for (uint64_t i = 0; i < grad_count; ++i) {
      const engine::LentGrad &grad = lent[i];
      if (accumulate) accumulate[i] = grad.accumulate;
      write_element(
          grads, i, grad_stride,
          grad.data ? view_of(runtime.context, grad.data, runtime.param(impl, i).shape, grad.dtype, 0) : fsdp_tensor{});
    }
  });
}

fsdp_status fsdp_put_grad(fsdp_group *group, uint64_t param_index, const void *data, fsdp_dtype dtype,
                          uint64_t element_count, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_put_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_flags(flags, FSDP_GRAD_NO_WAIT, call, "flags");
    runtime.step.require_weights(call);
    model.reducer(call).put(impl, param_index, data, dtype, element_count, flags, stream);
  });
}

fsdp_status fsdp_complete_grad(fsdp_group *group, uint64_t param_index, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_complete_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    runtime.step.require_weights(call);
    model.reducer(call).complete(impl, param_index, stream);
  });
}

fsdp_status fsdp_reduce_grad(fsdp_group *group, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_reduce_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_flags(flags, FSDP_LAST, call, "flags");
    runtime.step.require_weights(call);
    model.reducer(call).reduce(impl, flags, stream);
  });
}

fsdp_status fsdp_finish_grads(fsdp_model *model, double scale, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_finish_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    check_flags(flags, FSDP_LAST, call, "flags");
    check_factor(scale, call, "scale");
    impl.update(call).finish_grads(scale, flags, stream);
  });
}

fsdp_status fsdp_publish_weights(fsdp_model *model, fsdp_stream stream) {
  constexpr auto call = "fsdp_publish_weights";
  return in_model(model, call, [&](engine::Model &impl) { impl.update(call).publish(stream); });
}

fsdp_status fsdp_begin_update(fsdp_model *model, fsdp_stream stream) {
  constexpr auto call = "fsdp_begin_update";
  return in_model(model, call, [&](engine::Model &impl) { impl.update(call).begin(stream); });
}

fsdp_status fsdp_discard_step(fsdp_model *model, fsdp_stream stream) {
  constexpr auto call = "fsdp_discard_step";
  return in_model(model, call, [&](engine::Model &impl) { impl.update(call).discard(stream); });
}

fsdp_status fsdp_check_replicas(fsdp_model *model, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_check_replicas";
  return in_model(model, call, [&](engine::Model &impl) {
    check_flags(flags, 0, call, "flags");
    engine::check_replicas(impl.runtime(call), stream);
  });
}

}  // extern "C"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

template <class Body>
fsdp_status in_capture(fsdp_capture *handle, const char *name, Body &&body) noexcept {
  std::shared_ptr<engine::Model> model;
  try {
    const auto held = acquire(handle, name);
    const std::shared_ptr<engine::Capture> &capture = held->capture;
    model = held->model.lock();
    if (!model) fail(FSDP_INVALID_HANDLE, "{}: the model of the capture was destroyed", name);
    engine::CallScope scope(model->context(), name);
    run_call(*model, name, [&] { body(*model, capture); });
    scope.done();
    return FSDP_OK;
  } catch (...) {
    return report_current(model ? &model->context() : nullptr);
  }
}

}  // namespace

extern "C" {

fsdp_status fsdp_begin_capture(fsdp_model *model, fsdp_stream stream) {
  constexpr auto call = "fsdp_begin_capture";
  return in_model(model, call, [&](engine::Model &impl) { impl.graphs(call).begin_capture(stream); });
}

fsdp_status fsdp_end_capture(fsdp_model *model, fsdp_stream stream, fsdp_capture **capture) {
  constexpr auto call = "fsdp_end_capture";
  if (capture) *capture = nullptr;
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(capture, call, "capture");
    // Memory is allocated first, because nothing may fail once the capture has ended.
    const auto held = std::make_shared<HandledCapture>();
    NewHandle<fsdp_capture> handle(held);
    held->model = acquire(model, call);
    held->capture = impl.graphs(call).end_capture(stream);
    *capture = handle.give_out();
  });
}

fsdp_status fsdp_prepare_replay(fsdp_capture *capture, double lr, fsdp_stream stream) {
  constexpr auto call = "fsdp_prepare_replay";
  return in_capture(capture, call, [&](engine::Model &model, const std::shared_ptr<engine::Capture> &impl) {
    check_factor(lr, call, "lr");
    model.graphs(call).prepare_replay(impl, lr, stream);
  });
}

fsdp_status fsdp_commit_replay(fsdp_capture *capture, fsdp_stream stream) {
  constexpr auto call = "fsdp_commit_replay";
  return in_capture(capture, call,
                    [&](engine::Model &model, const auto &impl) { model.graphs(call).commit_replay(*impl, stream); });
}

fsdp_status fsdp_cancel_replay(fsdp_capture *capture, fsdp_stream stream) {
  constexpr auto call = "fsdp_cancel_replay";
  return in_capture(capture, call,
                    [&](engine::Model &model, const auto &impl) { model.graphs(call).cancel_replay(*impl, stream); });
}

void fsdp_destroy_capture(fsdp_capture *capture) {
  const auto impl = find(capture);
  if (!impl) return;
  const auto model = impl->model.lock();
  if (model && model->context().in_child()) return forget(capture);
  remove(capture);
}

}  // extern "C"
