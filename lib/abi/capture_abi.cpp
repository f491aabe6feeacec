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
    const std::shared_ptr<engine::Capture> capture = acquire(handle, name);
    model = handle->model.lock();
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

fsdp_status fsdp_capture_begin(fsdp_model *model, fsdp_stream stream) {
  return in_model(model, "fsdp_capture_begin", [&](engine::Model &impl) { impl.begin_capture(stream); });
}

fsdp_status fsdp_capture_end(fsdp_model *model, fsdp_stream stream, fsdp_capture **capture) {
  constexpr auto call = "fsdp_capture_end";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(capture, call, "capture");
    *capture = nullptr;
    auto handle = std::make_unique<fsdp_capture>();
    handle->model = model->held.copy();
    handle->held.put(impl.end_capture(stream));
    *capture = handle.release();
  });
}

fsdp_status fsdp_prepare_replay(fsdp_capture *capture, double lr, fsdp_stream stream) {
  constexpr auto call = "fsdp_prepare_replay";
  return in_capture(capture, call, [&](engine::Model &model, const std::shared_ptr<engine::Capture> &impl) {
    if (!std::isfinite(lr)) fail(FSDP_INVALID_ARGUMENT, "{}: lr is {}, it must be finite", call, lr);
    model.prepare_replay(impl, lr, stream);
  });
}

fsdp_status fsdp_commit_replay(fsdp_capture *capture, fsdp_stream stream) {
  return in_capture(capture, "fsdp_commit_replay",
                    [&](engine::Model &model, const auto &impl) { model.commit_replay(*impl, stream); });
}

fsdp_status fsdp_cancel_replay(fsdp_capture *capture, fsdp_stream stream) {
  return in_capture(capture, "fsdp_cancel_replay",
                    [&](engine::Model &model, const auto &impl) { model.cancel_replay(*impl, stream); });
}

void fsdp_destroy_capture(fsdp_capture *capture) {
  if (!begin_destroy(capture)) return;
  const auto impl = capture->held.take();
  bury(std::unique_ptr<fsdp_capture>(capture));
}

}  // extern "C"
