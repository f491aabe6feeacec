// SPDX-License-Identifier: Apache-2.0
// Parts of a step as CUDA graphs. Included by fsdp.hpp.
#ifndef FSDP_CAPTURE_HPP
#define FSDP_CAPTURE_HPP

#include <fsdp.h>

#include <memory>

#include "model.hpp"

namespace fsdp {

/** From here to Capture::end the model's calls record their work into the graph that the stream is being captured into.
 */
inline void begin_capture(Model &model, fsdp_stream stream) { detail::check(fsdp_begin_capture(model.get(), stream)); }

/** A part of a step that was captured into a CUDA graph. */
class Capture {
 public:
  /** Ends the capture, before the caller ends that of the stream. */
  static Capture end(Model &model, fsdp_stream stream) {
    fsdp_capture *made = nullptr;
    const fsdp_status status = fsdp_end_capture(model.get(), stream, &made);
    Capture capture(model.hooks(), made);
    detail::check(status);
    return capture;
  }
  /** Call this before each launch; lr counts only if the capture has a step. */
  void prepare_replay(double lr, fsdp_stream stream) { detail::check(fsdp_prepare_replay(get(), lr, stream)); }
  /** Call this after the launch. */
  void commit_replay(fsdp_stream stream) { detail::check(fsdp_commit_replay(get(), stream)); }
  /** Call this instead of commit_replay if the graph was not launched. */
  void cancel_replay(fsdp_stream stream) { detail::check(fsdp_cancel_replay(get(), stream)); }

  fsdp_capture *get() const noexcept { return raw_.get(); }

 private:
  Capture(detail::KeptHooks hooks, fsdp_capture *raw) : hooks_(std::move(hooks)), raw_(raw) {}

  detail::KeptHooks hooks_;  // outlives raw_
  detail::Handle<fsdp_capture, fsdp_destroy_capture> raw_;
};

}  // namespace fsdp

#endif
