// SPDX-License-Identifier: Apache-2.0
// The graphs of a model: at most one capture is under way, and at most one replay is prepared and not yet committed.
// All ranks synchronize to end a capture and to prepare a replay, so that no rank waits in a graph that others lack.
#pragma once

#include <memory>
#include <string>

#include "engine/model/capture.h"
#include "engine/model/checkpoints.h"
#include "engine/runtime/meetings.h"

namespace fsdp::engine {

class Graphs {
 public:
  Graphs(Runtime &runtime, Gatherer &gatherer, Reducer &reducer, Optimizer &optimizer, Checkpoints &checkpoints,
         Meetings &meetings)
      : runtime_(runtime),
        gatherer_(gatherer),
        reducer_(reducer),
        optimizer_(optimizer),
        checkpoints_(checkpoints),
        meetings_(meetings) {}
  // Waits, since a prepared graph may have been launched.
  ~Graphs() { await_prepared(); }
  Graphs(const Graphs &) = delete;
  Graphs &operator=(const Graphs &) = delete;

  void begin_capture(fsdp_stream stream);
  std::shared_ptr<Capture> end_capture(fsdp_stream stream);
  void prepare_replay(const std::shared_ptr<Capture> &capture, double lr, fsdp_stream stream);
  void commit_replay(Capture &capture, fsdp_stream stream);
  void cancel_replay(Capture &capture, fsdp_stream stream);

  // The capture under way, or NULL; and its number, or 0.
  Capture *capture() const { return capture_.get(); }
  uint32_t number() const { return capture_ ? capture_->number() : 0; }
  // Throws INVALID_STATE while a replay is prepared. Gives up a replay whose capture no longer exists.
  void require_no_replay(const char *call) {
    if (prepared_.number) refuse_prepared(call);
  }
  // Called when a call ends with the error. Spoils a capture that contains the call. If the call has waited for too
  // long, names a replay that did not end as a possible reason.
  void note_failure(const char *call, Error &error) noexcept;
  // Describes an open capture or replay and what ends it; empty if there is none.
  std::string describe_open() const;

 private:
  void require_no_skips(const char *call) const;
  void end_failed_begin();
  std::string find_obstacle(const Capture &capture, fsdp_stream stream);
  void require_prepared(const Capture &capture, fsdp_stream stream, const char *call) const;
  void refuse_prepared(const char *call);
  void give_up_replay();
  void await_prepared() noexcept;

  Runtime &runtime_;
  Gatherer &gatherer_;
  Reducer &reducer_;
  Optimizer &optimizer_;
  Checkpoints &checkpoints_;
  Meetings &meetings_;
  std::shared_ptr<Capture> capture_;
  // The error of a failed begin, until the ranks meet again; fsdp_end_capture tells it to the other ranks. Empty: none.
  std::string failed_begin_;
  uint64_t failed_at_ = 0;  // the number of meetings when the begin failed
  struct Prepared {
    uint32_t number = 0;  // number of the capture; 0: no replay is prepared
    std::weak_ptr<Capture> capture;
    fsdp_stream stream = nullptr;
  } prepared_;
};

}  // namespace fsdp::engine
