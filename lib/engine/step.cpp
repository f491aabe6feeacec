// SPDX-License-Identifier: Apache-2.0
#include "engine/step.h"

#include "base/error.h"

namespace fsdp::engine {

void Step::open_window(bool has_grads) {
  StepState::window_open = true;
  StepState::window_has_grads = has_grads;
}

void Step::close_window(bool ready) {
  StepState::version_ready = ready;
  StepState::window_open = StepState::window_has_grads = false;
  StepState::scalings.restart();
}

void Step::discard() {
  failure_.clear();
  StepState::window_open = StepState::window_has_grads = false;
  StepState::scalings.restart();
}

void Step::require_unfailed(const char *call) const {
  if (failed())
    fsdp::fail(FSDP_INVALID_STATE, "{}: this step has failed and must be discarded with fsdp_discard_step: {}", call,
               failure_);
}

void Step::require_weights(const char *call) const {
  require_unfailed(call);
  if (window_open())
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: the update window is open{}; close it with fsdp_publish_weights or a step that publishes{}", call,
               version() == 0 ? " (the model was sealed and nothing was published yet)" : "",
               version() == 0 ? "" : ", or with fsdp_discard_step");
}

void Step::require_window(const char *call) const {
  require_unfailed(call);
  if (!window_open())
    fsdp::fail(FSDP_INVALID_STATE, "{}: the update window is closed; fsdp_finish_grads or fsdp_begin_update opens it",
               call);
}

void Step::require_grads(const char *call) const {
  require_window(call);
  if (!window_has_grads())
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: there are no gradients in this update window; fsdp_finish_grads opens one that has them", call);
}

}  // namespace fsdp::engine
