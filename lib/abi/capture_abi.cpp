// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"

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
    // Room first: once the capture has ended, nothing may fail.
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
