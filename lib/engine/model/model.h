// SPDX-License-Identifier: Apache-2.0
// A model from its declaration to its end. Until the seal it only collects the caller's declarations; the seal plans
// the model (memory/model_plan) and makes the runtime and its parts. The model decides when calls may reach these
// parts.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "engine/gradients/matrices.h"
#include "engine/gradients/optimizer.h"
#include "engine/gradients/reduce.h"
#include "engine/model/checkpoints.h"
#include "engine/model/debug_views.h"
#include "engine/model/graphs.h"
#include "engine/model/shard_chunks.h"
#include "engine/model/update.h"
#include "engine/runtime/declaration.h"
#include "engine/runtime/meetings.h"
#include "engine/weights/gather.h"
#include "engine/weights/params.h"

namespace fsdp::engine {

// The parts that work on a sealed model's runtime. Each part knows the parts before it.

struct SealedParts {
  SealedParts(Runtime &runtime, bool adamw, bool counts_steps)
      : gatherer(runtime),
        reducer(runtime),
        optimizer(runtime),
        matrices(runtime, optimizer),
        chunks(runtime, optimizer),
        params(runtime),
        checkpoints(runtime, counts_steps),
        meetings(runtime),
        graphs(runtime, gatherer, reducer, optimizer, checkpoints, meetings),
        update(runtime, gatherer, reducer, optimizer, matrices, chunks, checkpoints, meetings, graphs, adamw) {}

  Gatherer gatherer;
  Reducer reducer;
  Optimizer optimizer;
  Matrices matrices;
  ShardChunks chunks;
  Params params;
  Checkpoints checkpoints;
  Meetings meetings;
  Graphs graphs;
  UpdateWindow update;
};

class Model : public OpenModel {
 public:
  Model(std::shared_ptr<Context> context, memory::ModelSpec spec, fsdp_optimizer optimizer, GroupDefaults defaults);
  ~Model() override { leave_context(); }
  Model(const Model &) = delete;
  Model &operator=(const Model &) = delete;
  // Removes the model from its context. The destructor of a derived class must call it first.
  void leave_context() noexcept { context_->remove_model(this); }

  Context &context() const { return *context_; }
  Declaration &declaration() { return declaration_; }
  const memory::ModelSpec &spec() const { return declaration_.spec(); }

  void seal();
  // plan() and the functions below throw INVALID_STATE before the seal. Those below also do so in a context that only
  // plans.
  const memory::ModelPlan &plan(const char *call) const;
  Gatherer &gatherer(const char *call) { return parts(call).gatherer; }
  Reducer &reducer(const char *call) { return parts(call).reducer; }
  Optimizer &optimizer(const char *call) { return parts(call).optimizer; }
  ShardChunks &chunks(const char *call) {
    SealedParts &sealed = parts(call);
    sealed.graphs.require_no_replay(call);
    return sealed.chunks;
  }
  Params &params(const char *call) { return parts(call).params; }
  Checkpoints &checkpoints(const char *call) {
    SealedParts &sealed = parts(call);
    sealed.graphs.require_no_replay(call);
    return sealed.checkpoints;
  }
  Graphs &graphs(const char *call) { return parts(call).graphs; }
  // runtime() and update() may also be called while a replay is prepared.
  Runtime &runtime(const char *call);
  UpdateWindow &update(const char *call);

  // These settings take effect from the next step on. The model's next meeting compares them.
  void set_lr_scale(const Group &group, uint64_t param_index, double lr_scale);
  void set_trainable(const Group &group, uint64_t param_index, bool trainable);
  void load_grad(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                 int32_t root);
  // Makes reports of this call's waits include the model's number, if the context has several models.
  void name_waits() const noexcept {
    if (runtime_ && context_->has_several_models()) context_->waiter().set_model(runtime_->number());
  }
  // See Graphs.
  void note_failure(const char *call, Error &error) noexcept;
  // Says what keeps the context from closing; empty if nothing does.
  std::string unfinished() const override;
  std::string open_graph() const override;
  // The bytes of a role, or of FSDP_ROLE_ALL: as planned for a rank of the job, and as allocated by this rank.
  uint64_t role_bytes(fsdp_role role, uint32_t rank) const;
  uint64_t allocated_bytes(fsdp_role role);
  void get_info(fsdp_model_info &info) const;
  void get_stats(fsdp_stats &stats);

 private:
  SealedParts &parts(const char *call) const {
    if (!parts_) [[unlikely]]
      refuse_parts(call);
    return *parts_;
  }
  [[noreturn]] void refuse_parts(const char *call) const;
  void seal_running();
  void create_teams_of_groups(std::vector<Teams> &teams);
  void log_granules() const;
  void log_padding() const;
  void log_memory() const;

  std::shared_ptr<Context> context_;
  Declaration declaration_;
  std::unique_ptr<memory::ModelPlan> plan_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<SealedParts> parts_;
  std::optional<DebugViews> views_;  // describes the runtime's memory, so it ends before the runtime
};

}  // namespace fsdp::engine
