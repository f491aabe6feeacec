// SPDX-License-Identifier: Apache-2.0
// The calls of a training step: gather, gradient, and what closes the step.
#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"

using namespace fsdp;
using namespace fsdp::abi;

extern "C" {

fsdp_status fsdp_prefetch(fsdp_group *group, fsdp_phase phase, fsdp_stream stream) {
  constexpr auto call = "fsdp_prefetch";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_phase(phase, call);
    runtime.caller_stream(stream, call);
    runtime.require_weights(call);
    model.context().flight().describe(impl.flight_name, phase);
    model.gatherer().prefetch(impl, phase);
  });
}

fsdp_status fsdp_unshard(fsdp_group *group, fsdp_phase phase, fsdp_stream stream) {
  constexpr auto call = "fsdp_unshard";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_phase(phase, call);
    runtime.require_weights(call);
    model.context().flight().describe(impl.flight_name, phase);
    model.gatherer().unshard(impl, phase, stream);
  });
}

fsdp_status fsdp_reshard(fsdp_group *group, fsdp_phase phase, fsdp_stream stream) {
  constexpr auto call = "fsdp_reshard";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_phase(phase, call);
    model.context().flight().describe(impl.flight_name, phase);
    model.gatherer().reshard(impl, phase, stream);
  });
}

fsdp_status fsdp_acquire_grad(fsdp_group *group, uint64_t param_index, fsdp_stream stream, fsdp_tensor *grad,
                              int32_t *accumulate) {
  constexpr auto call = "fsdp_acquire_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_output(grad, call, "fsdp_tensor");
    check_pointer(accumulate, call, "accumulate");
    runtime.require_weights(call);
    fsdp_tensor value = FSDP_TENSOR_INIT;
    model.reducer().acquire(impl, param_index, stream, value, *accumulate);
    write_output(grad, value);
  });
}

fsdp_status fsdp_put_grad(fsdp_group *group, uint64_t param_index, const void *data, fsdp_dtype dtype,
                          uint64_t element_count, fsdp_stream stream) {
  constexpr auto call = "fsdp_put_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    runtime.require_weights(call);
    model.reducer().put(impl, param_index, data, dtype, element_count, stream);
  });
}

fsdp_status fsdp_reduce_grad(fsdp_group *group, uint32_t flags, fsdp_stream stream) {
  constexpr auto call = "fsdp_reduce_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_flags(flags, FSDP_LAST, call, "flags");
    runtime.require_weights(call);
    model.reducer().reduce(impl, flags, stream);
  });
}

fsdp_status fsdp_finish_grads(fsdp_model *model, double scale, fsdp_stream stream) {
  constexpr auto call = "fsdp_finish_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    if (!std::isfinite(scale)) fail(FSDP_INVALID_ARGUMENT, "{}: scale is {}, it must be finite", call, scale);
    impl.finish_grads(scale, stream);
  });
}

fsdp_status fsdp_publish_weights(fsdp_model *model, fsdp_stream stream) {
  return in_model(model, "fsdp_publish_weights", [&](engine::Model &impl) { impl.publish(stream); });
}

fsdp_status fsdp_begin_update(fsdp_model *model, fsdp_stream stream) {
  return in_model(model, "fsdp_begin_update", [&](engine::Model &impl) { impl.begin_update(stream); });
}

fsdp_status fsdp_discard_step(fsdp_model *model, fsdp_stream stream) {
  return in_model(model, "fsdp_discard_step", [&](engine::Model &impl) { impl.discard(stream); });
}

}  // extern "C"
