// SPDX-License-Identifier: Apache-2.0
// Makes calls in the order in which programs make them, so that the random calls between them find every state.
#include <algorithm>

#include "memory.h"

namespace fuzz {
namespace {

// Makes the program's next call, and now and then any other call before it.
void go_on(Rank &rank, const char *name) {
  const Aim aim = rank.aim;
  if (rank.wildness && rank.random.one_in(2 + rank.wildness / 4)) call_anything(rank);
  rank.aim = aim;
  call(rank, name);
}

std::vector<void *> groups_of(const Rank &rank, const fsdp_model *model) {
  std::vector<void *> found;
  std::ranges::copy_if(rank.alive[a_group], std::back_inserter(found),
                       [&](void *group) { return rank.groups.at(group).model == model; });
  return found;
}

void visit_params(Rank &rank, const char *name, const char *other) {
  const std::vector<ParamFacts> params = rank.groups.at(rank.aim.group).params;
  for (rank.aim.param = 0; rank.aim.param < params.size(); ++rank.aim.param)
    if (!params[rank.aim.param].frozen && params[rank.aim.param].trained)
      go_on(rank, rank.random.one_in(3) ? other : name);
  rank.aim.param = 0;
}

void pass(Rank &rank, fsdp_phase phase, bool last) {
  auto groups = groups_of(rank, rank.aim.model);
  if (phase == FSDP_BACKWARD) std::ranges::reverse(groups);
  for (void *const group : groups) {
    rank.aim.group = static_cast<fsdp_group *>(group);
    rank.aim.phase = phase;
    go_on(rank, "fsdp_unshard");
    static constexpr const char *views[] = {"fsdp_get_param", "fsdp_get_params", "fsdp_get_plane"};
    if (rank.random.one_in(3)) go_on(rank, views[rank.random.below(std::size(views))]);
    if (phase == FSDP_BACKWARD && rank.random.one_in(3))
      go_on(rank, "fsdp_acquire_grads");
    else if (phase == FSDP_BACKWARD)
      visit_params(rank, "fsdp_acquire_grad", "fsdp_put_grad");
    if (phase == FSDP_BACKWARD && rank.random.one_in(4)) visit_params(rank, "fsdp_complete_grad", "fsdp_complete_grad");
    if (rank.random.one_in(8)) go_on(rank, "fsdp_restore_view");  // the weights are held
    rank.aim.piece = static_cast<uint32_t>(rank.random.below(2));
    if (rank.random.one_in(4)) go_on(rank, "fsdp_unshard_piece"), go_on(rank, "fsdp_reshard_piece");
    go_on(rank, "fsdp_reshard");
    if (rank.random.one_in(8)) go_on(rank, "fsdp_restore_view");
    rank.aim.flags = last ? FSDP_LAST : 0;
    if (phase == FSDP_BACKWARD) go_on(rank, "fsdp_reduce_grad");
    if (phase == FSDP_BACKWARD && last && rank.random.one_in(8)) go_on(rank, "fsdp_acquire_grads");  // it is too late
  }
}

// Changes the gradients of one group, if the group is trained.
void change_grads(Rank &rank) {
  const auto groups = groups_of(rank, rank.aim.model);
  if (groups.empty()) return;
  rank.aim.group = static_cast<fsdp_group *>(groups[rank.random.below(groups.size())]);
  visit_params(rank, "fsdp_read_grad", "fsdp_load_grad");
}

bool rounds(const Rank &rank) {
  return std::ranges::any_of(rank.groups, [&](const auto &group) {
    return group.second.model == rank.aim.model && group.second.main_storage == FSDP_MAIN_NONE;
  });
}

// Collects matrices, asks for all or some of them, and returns them.
void change_matrices(Rank &rank) {
  go_on(rank, "fsdp_collect_matrices");
  for (uint64_t i = 2 + rank.random.below(8); i > 0; --i) go_on(rank, "fsdp_next_matrix");
  go_on(rank, "fsdp_return_matrices");
  if (rank.random.one_in(8)) go_on(rank, "fsdp_discard_step");
}

// Goes through all chunks of shards, unless calls are refused.
void change_chunks(Rank &rank) {
  for (int i = 0; i < 64; ++i) {
    go_on(rank, "fsdp_next_shard_chunk");
    if (!rank.chunked.contains(rank.aim.model)) return;
    go_on(rank, "fsdp_get_shard_chunk_state");
  }
}

void end_step(Rank &rank, bool ends_groups) {
  static constexpr const char *between[] = {"fsdp_scale_grads",          "fsdp_clip_grads",
                                            "fsdp_check_grads",          "fsdp_get_grad_norm",
                                            "fsdp_get_param_grad_norms", "fsdp_get_param_weight_norms",
                                            "fsdp_count_zero_grads",     "fsdp_get_last_norm"};
  rank.aim.flags = ends_groups ? FSDP_LAST : 0;
  go_on(rank, "fsdp_finish_grads");
  if (rank.random.one_in(3)) change_grads(rank);
  for (uint64_t i = rank.random.below(4); i > 0; --i) go_on(rank, between[rank.random.below(std::size(between))]);
  if (rank.random.one_in(3)) change_matrices(rank);
  if (rank.chunked.contains(rank.aim.model) || rank.random.one_in(2)) change_chunks(rank);
  if (rounds(rank)) go_on(rank, "fsdp_round_stochastic");
  go_on(rank, rank.random.one_in(4) ? "fsdp_publish_weights" : "fsdp_step_adamw");
  if (rank.random.one_in(4)) go_on(rank, "fsdp_check_replicas");
  if (rank.random.one_in(4)) go_on(rank, "fsdp_get_param_weight_norms");
}

void step(Rank &rank) {
  const uint64_t batches = 1 + rank.random.below(2);
  const bool ends_groups = rank.random.one_in(4);
  for (uint64_t i = 0; i < batches; ++i) {
    pass(rank, FSDP_FORWARD, false);
    pass(rank, FSDP_BACKWARD, i + 1 == batches && !ends_groups);
  }
  end_step(rank, ends_groups);
}

// Makes its own checkpoint, from begin to end. No other handle is left that a call could take instead.
void save_beside(Rank &rank) {
  for (int tries = 0; tries < 16 && rank.any(a_checkpoint); ++tries) call(rank, "fsdp_destroy_checkpoint");
  for (const char *name :
       {"fsdp_begin_checkpoint", "fsdp_add_checkpoint_model", "fsdp_add_checkpoint_bytes", "fsdp_commit_checkpoint",
        "fsdp_wait_checkpoint", "fsdp_destroy_checkpoint", "fsdp_open_checkpoint", "fsdp_read_checkpoint_bytes",
        "fsdp_begin_update", "fsdp_load_checkpoint_model", "fsdp_publish_weights", "fsdp_destroy_checkpoint"})
    call(rank, name);
}

void load(Rank &rank) {
  static constexpr const char *ways[] = {"fsdp_load_param", "fsdp_load_param",         "fsdp_load_chunk",
                                         "fsdp_load_plane", "fsdp_load_state",         "fsdp_read_param",
                                         "fsdp_read_state", "fsdp_set_param_lr_scale", "fsdp_set_param_trainable"};
  for (void *const group : groups_of(rank, rank.aim.model)) {
    rank.aim.group = static_cast<fsdp_group *>(group);
    const uint64_t count = rank.groups.at(group).params.size();
    for (rank.aim.param = 0; rank.aim.param < count; ++rank.aim.param)
      if (rank.random.one_in(2)) go_on(rank, ways[rank.random.below(std::size(ways))]);
  }
}

}  // namespace

void declare(Rank &rank) {
  static constexpr const char *optional[] = {"fsdp_set_schedule", "fsdp_add_optimizer_state", "fsdp_set_arena",
                                             "fsdp_check_model"};
  rank.aim = {};
  rank.aim.context =
      static_cast<fsdp_context *>(rank.alive[a_context].empty() ? nullptr : rank.alive[a_context].front());
  if (rank.random.one_in(2)) call(rank, "fsdp_create_mesh");
  call(rank, "fsdp_create_model");
  for (uint64_t i = 1 + rank.random.below(4); i > 0; --i) call(rank, "fsdp_create_group");
  if (rank.aim.has_home) call(rank, "fsdp_add_optimizer_state");
  for (const char *name : optional)
    if (rank.random.one_in(5)) call(rank, name);
  go_on(rank, "fsdp_seal_model");
  load(rank);
  go_on(rank, "fsdp_publish_weights");
}

void train(Rank &rank) {
  for (uint64_t i = rank.random.below(4); i > 0; --i) {
    if (rank.random.one_in(4))
      go_on(rank, "fsdp_apply_grads");
    else
      step(rank);
    if (rank.random.one_in(4)) go_on(rank, "fsdp_discard_step");
    if (rank.random.one_in(6)) {
      go_on(rank, "fsdp_begin_update");
      load(rank);
      if (rank.random.one_in(2)) go_on(rank, rank.random.one_in(2) ? "fsdp_load" : "fsdp_load_weights");
      go_on(rank, "fsdp_publish_weights");
    }
    if (rank.random.one_in(6)) go_on(rank, "fsdp_save");
    if (!rank.plans && rank.random.one_in(4)) save_beside(rank);
  }
}

// Releases everything in any order, and some handles twice.
void leave(Rank &rank) {
  if (rank.random.one_in(2)) call(rank, "fsdp_close_context");
  rank.wildness = 0;
  rank.say_left();
  std::vector<std::pair<Kind, void *>> all;
  for (const Kind kind : {a_context, a_mesh, a_model, a_capture, a_checkpoint})
    for (void *handle : rank.alive[kind]) all.emplace_back(kind, handle);
  for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[rank.random.below(i)]);
  for (const auto &[kind, handle] : all) {
    if (kind == a_context) fsdp_destroy_context(static_cast<fsdp_context *>(handle));
    if (kind == a_mesh) fsdp_destroy_mesh(static_cast<fsdp_mesh *>(handle));
    if (kind == a_model) fsdp_destroy_model(static_cast<fsdp_model *>(handle));
    if (kind == a_capture) fsdp_destroy_capture(static_cast<fsdp_capture *>(handle));
    if (kind == a_checkpoint) fsdp_destroy_checkpoint(static_cast<fsdp_checkpoint *>(handle));
  }
}

}  // namespace fuzz
