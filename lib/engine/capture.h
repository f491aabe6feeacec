// SPDX-License-Identifier: Apache-2.0
// A part of a step as a CUDA graph. The caller's stream is captured by the caller; between begin and end the library's calls
// record into that capture what they would enqueue, and its streams join it by events. What the calls did to the model's
// state is kept and undone at the end, since nothing of it has happened yet. A replay then is three things:
//
//   prepare   the state must be the one from before the capture, on every rank; the graph comes after all that the library
//             was given; the step's numbers are written to the device
//   launch    the caller's
//   commit    the state goes on as the calls of the capture said, and what follows comes after the graph
//
// Nothing of the graph may refer to events from before it: begin waits until the library's work is done, and prepare
// orders what has been enqueued since.
#pragma once

#include <memory>

#include "engine/model.h"
#include "engine/state.h"

namespace fsdp::engine {

class Capture {
 public:
  Capture(Model &model, uint64_t number, fsdp_stream stream);
  Capture(const Capture &) = delete;
  Capture &operator=(const Capture &) = delete;

  // The capture ends, whatever happens: the state is put back also if this throws.
  void end(fsdp_stream stream);
  void prepare(double lr, fsdp_stream stream);
  void commit(fsdp_stream stream);
  // What a model that ends in the middle of it needs.
  void abandon() noexcept;

  // A step of AdamW is captured: its lr, step and corrections are those of each replay.
  void add_step(const fsdp_adamw_options &options);

 private:
  void await_library();
  void join(device::Stream &caller);
  void follow(device::Stream &caller);
  State read() const;
  void write(const State &state);

  Model &model_;
  Runtime &runtime_;
  uint64_t number_;  // of the model's captures: the same on every rank
  State before_, after_;
  bool has_step_ = false;
  fsdp_adamw_options adamw_{};
};

}  // namespace fsdp::engine
