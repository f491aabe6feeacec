// SPDX-License-Identifier: Apache-2.0
// A model from its declaration to its end. Until the seal it only collects what the caller declares; the seal plans it
// (memory/model_plan), makes the runtime, and from then on its calls check the update window and drive the runtime.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_set>

#include "engine/context.h"
#include "engine/gather.h"
#include "engine/meeting.h"
#include "engine/optimizer.h"
#include "engine/params.h"
#include "engine/reduce.h"
#include "engine/runtime.h"
#include "memory/model_plan.h"

namespace fsdp::engine {

class Capture;

// What a group gets where its own options are 0.
struct GroupDefaults {
  fsdp_strategy strategy = FSDP_OPTIM_GRADS_PARAMS;
  fsdp_dtype grad_dtype = 0;
  fsdp_dtype reduce_dtype = 0;
  fsdp_reduce_policy reduce_policy = 0;
};

class Model : public OpenModel {
 public:
  Model(std::shared_ptr<Context> context, memory::ModelSpec spec, fsdp_optimizer optimizer, GroupDefaults defaults);
  ~Model() override;
  Model(const Model &) = delete;
  Model &operator=(const Model &) = delete;

  Context &context() { return *context_; }
  const memory::ModelSpec &spec() const { return spec_; }
  const GroupDefaults &defaults() const { return defaults_; }
  bool sealed() const { return sealed_; }

  // -- declaration --
  uint32_t add_group(memory::GroupSpec group);
  void set_schedule(fsdp_schedule_kind kind, std::vector<fsdp_visit> visits);
  void add_state(memory::StateSpec state);
  void set_arena(fsdp_role role, void *data, uint64_t size_bytes);
  void seal();

  // -- sealed --
  const memory::ModelPlan &plan(const char *call) const;
  Runtime &runtime(const char *call);
  Gatherer &gatherer() { return *gatherer_; }
  Reducer &reducer() { return *reducer_; }
  Optimizer &optimizer() { return *optimizer_; }
  Params &params() { return *params_; }

  // The window is open and holds the gradients of a finished step.
  void require_grads(const char *call);
  // ... and the host may wait for what it asks of them. The stream that it asks on.
  device::Stream &require_measurable(fsdp_stream stream, const char *call);

  // -- the step's end (step.cpp) --
  void finish_grads(double scale, fsdp_stream stream);
  void begin_update(fsdp_stream stream);
  void publish(fsdp_stream stream, const char *call = "fsdp_publish_weights");
  void discard(fsdp_stream stream);
  void step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream, const char *call = "fsdp_step_adamw");
  double apply_grads(const fsdp_grad *grads, uint64_t count, double lr, double max_norm, const fsdp_adamw_options &options,
                     fsdp_stream stream, bool want_norm);

  // -- graphs (capture.cpp, replay.cpp) --
  void begin_capture(fsdp_stream stream);
  std::shared_ptr<Capture> end_capture(fsdp_stream stream);
  void prepare_replay(const std::shared_ptr<Capture> &capture, double lr, fsdp_stream stream);
  void commit_replay(Capture &capture, fsdp_stream stream);
  void cancel_replay(Capture &capture, fsdp_stream stream);
  // A call of this model ends with the error: a capture in which it was made is of no use, and of one that has waited
  // for too long the replay that did not end may be the reason.
  void note_failure(const char *call, Error &error) noexcept;

  // What keeps the context from closing, as text; empty if nothing.
  std::string unfinished() const override;
  std::string open_graph() const override;
  void get_memory(uint32_t rank, fsdp_memory &memory) const;
  void get_stats(fsdp_stats &stats);

 private:
  void require_unsealed(const char *call) const;
  std::unique_ptr<memory::ModelPlan> make_plan() const;
  void seal_running();
  void meet(Intent intent, double value, const std::string &missing, uint32_t capture = 0);
  void check_meeting(Intent intent, double value);
  void check_versions();
  std::string compare_calls();
  void end_step(Intent intent, double value, std::string missing, device::Stream &caller);
  void await_readers(device::Stream &caller);
  void realign();
  void end_messages(fsdp_stream stream);
  void realign_messages();
  void exchange_meetings();
  device::Stream &gather_outer_weights(device::Stream &caller);
  void close_window(device::Stream &caller);
  void refresh_whole_weights(device::Stream &caller);
  void check_grads(const fsdp_grad *grads, uint64_t count, const char *call) const;
  void require_adamw(const char *call) const;
  void require_no_replay(const char *call);
  std::string find_obstacle(const Capture &capture, fsdp_stream stream);
  void require_prepared(const Capture &capture, fsdp_stream stream, const char *call) const;
  void give_up_replay();
  void end_failed_begin();
  void await_prepared() noexcept;

  std::shared_ptr<Context> context_;
  memory::ModelSpec spec_;
  fsdp_optimizer optimizer_kind_;
  GroupDefaults defaults_;
  std::unordered_set<std::string> param_names_, group_names_;
  std::map<fsdp_role, CallerArena> arenas_;
  bool sealed_ = false;
  std::unique_ptr<memory::ModelPlan> plan_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Gatherer> gatherer_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Params> params_;
  std::shared_ptr<Capture> capture_;  // under way; NULL: none
  uint32_t capture_count_ = 0;     // that the ranks have met in
  std::string failed_begin_;       // since the ranks met last: what fsdp_capture_end tells the others; empty: none
  // The replay that must be launched and committed, or given up, before anything else. A capture that is gone gives it
  // up.
  struct Prepared {
    uint32_t number = 0;  // of the capture; 0: none is prepared
    std::weak_ptr<Capture> capture;
    fsdp_stream stream = nullptr;
  } prepared_;
  std::vector<Meeting> meetings_;  // one a rank, and this rank's own at the end
};

// verify.cpp: compares what every rank declared; throws MISMATCH naming the first difference.
void verify_declarations(comm::Team &team, const memory::ModelSpec &spec, const memory::ModelPlan &plan);
// describe.cpp: the layout as JSON.
std::string describe(const memory::ModelSpec &spec, const memory::ModelPlan &plan);

}  // namespace fsdp::engine
