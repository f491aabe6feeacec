// SPDX-License-Identifier: Apache-2.0
// The update window of a sealed model: the calls that open it, change main weights in it, and close it. All ranks take
// part in each of these calls.
#pragma once

#include "base/checked.h"
#include "engine/gradients/given_grads.h"
#include "engine/gradients/matrices.h"
#include "engine/gradients/optimizer.h"
#include "engine/gradients/reduce.h"
#include "engine/model/checkpoints.h"
#include "engine/model/graphs.h"
#include "engine/model/shard_chunks.h"
#include "engine/runtime/meetings.h"
#include "engine/weights/gather.h"

namespace fsdp::engine {

class UpdateWindow {
 public:
  // `adamw`: the optimizer is AdamW; if false, the caller updates weights itself.
  UpdateWindow(Runtime &runtime, Gatherer &gatherer, Reducer &reducer, Optimizer &optimizer, Matrices &matrices,
               ShardChunks &chunks, Checkpoints &checkpoints, Meetings &meetings, Graphs &graphs, bool adamw)
      : runtime_(runtime),
        gatherer_(gatherer),
        reducer_(reducer),
        optimizer_(optimizer),
        matrices_(matrices),
        chunks_(chunks),
        checkpoints_(checkpoints),
        meetings_(meetings),
        graphs_(graphs),
        given_(runtime),
        adamw_(adamw),
        awaited_(runtime.comms.size()) {}

  void finish_grads(double scale, uint32_t flags, fsdp_stream stream, const StepNumbers &numbers = {});
  void begin(fsdp_stream stream);
  void publish(fsdp_stream stream);
  void step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream);
  // Does a whole step with gradients that the caller already has. `norm` is NULL if the caller does not want the norm.
  void apply_grads(const Strided<fsdp_grad> &grads, double lr, double max_norm, const fsdp_adamw_options &options,
                   fsdp_stream stream, double *norm);
  void discard(fsdp_stream stream);
  void collect_matrices(const char *source, const char *target, fsdp_dtype dtype, fsdp_stream stream);
  std::optional<GivenMatrices> next_matrix(fsdp_stream stream);
  void return_matrices(fsdp_stream stream);

  // Requires that no step has begun to take gradients, and that no gradients of a step are in the window.
  void require_between_steps(const char *call) const;
  // Requires that the window is open, has the gradients of a finished step, that no matrices are collected, and that no
  // chunks are given.
  void require_grads(const char *call) const {
    runtime_.step.require_grads(call);
    runtime_.step.require_returned(call);
  }
  // Also requires that the host may wait for results. Returns the stream for the work.
  device::Stream &require_measurable(fsdp_stream stream, const char *call);
  // Requires only that no step has failed and that the host may wait for results, because weights can be measured at
  // any time.
  device::Stream &require_readable(fsdp_stream stream, const char *call);
  // Requires the same as require_measurable(), for a norm. If no call waits for the norm, so that the host neither
  // reads nor adds it, it may be part of a graph.
  device::Stream &require_norm(fsdp_stream stream, bool waits, const char *call);
  // Says what a step still has to do before it can end; empty if nothing remains.
  std::string list_unfinished() const;

 private:
  void require_adamw(const char *call) const;
  // Checks the last meeting. After matrices have been written to memory that a discard cannot restore, an error is
  // fatal.
  void check_window(Intent intent);
  template <class Body>
  void run_in_window(Body &&body);
  std::string find_written() const;
  // Requires that AdamW updates all parameters that are trained now.
  void require_adamw_alone(const char *call) const;
  void capture_norm(bool waits, const char *call);
  // -- how a step ends --
  void end_step(Meetings::Arrival call, device::Stream &caller);
  void await_readers(device::Stream &caller);
  void put_grads(const Strided<fsdp_grad> &grads, fsdp_stream stream);
  void open_with_grads(device::Stream &caller);
  void check_grads(const Strided<fsdp_grad> &grads, const char *call) const;
  void compare_reduces(Meetings::Arrival call, device::Stream &caller);
  std::optional<Error> find_broken() const;
  // -- how weights are published --
  void close_window(device::Stream &caller);
  device::Stream &gather_outer_weights(device::Stream &caller);
  void refresh_whole_weights(device::Stream &caller);
  // -- how a step is given up --
  void start_trace_rounds();
  void realign();
  void end_messages(fsdp_stream stream);
  void await_ended_steps();
  void realign_messages();

  Runtime &runtime_;
  Gatherer &gatherer_;
  Reducer &reducer_;
  Optimizer &optimizer_;
  Matrices &matrices_;
  ShardChunks &chunks_;
  Checkpoints &checkpoints_;
  Meetings &meetings_;
  Graphs &graphs_;
  GivenGrads given_;
  bool adamw_;
  std::vector<uint8_t> awaited_;  // for a refresh of whole weights, by mesh: have its parts been awaited?
};

}  // namespace fsdp::engine
