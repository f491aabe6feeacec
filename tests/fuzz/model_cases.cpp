// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "memory.h"

namespace fuzz {
namespace {

fsdp_status create_model(Rank &rank) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.mesh = rank.random.one_in(4) ? rank.mesh() : nullptr;
  options.flags = rank.flags(FSDP_MODEL_NO_PREFETCH | FSDP_MODEL_FORCE_COMMUNICATION);
  options.strategy = rank.choice(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  options.outer_strategy = rank.exactly(0);
  options.unshard_mode = rank.choice(FSDP_UNSHARD_COPIED);
  options.grad_dtype = rank.random.one_in(2) ? FSDP_FLOAT32 : rank.choice(FSDP_FLOAT16);
  options.reduce_dtype = rank.random.one_in(2) ? 0 : rank.choice(FSDP_FLOAT16);
  options.grad_op = rank.choice(FSDP_GRAD_OP_FACTOR);
  options.reduce_policy = rank.random.one_in(2) ? 0 : rank.choice(FSDP_REDUCE_POLICY_LAST);
  options.grad_factor = rank.real(0.5);
  const fsdp_optimizer adamw = rank.random.one_in(4) ? FSDP_OPTIMIZER_ADAMW_8BIT : FSDP_OPTIMIZER_ADAMW;
  options.optimizer = rank.random.one_in(3) ? FSDP_OPTIMIZER_CALLER + 0 : rank.exactly(adamw);
  options.max_pending_groups = rank.number32(0);
  options.max_pending_bytes = rank.number(rank.random.one_in(4) ? uint64_t{4096} << rank.random.below(5) : 0);
  options.prefetch_depth = rank.number32(static_cast<uint32_t>(rank.random.below(3)));
  options.view_kind = rank.choice(FSDP_VIEWS_PRIVATE);
  options.prefetch_bytes = rank.number(0);
  options.main_storage = rank.random.one_in(3) ? rank.choice(FSDP_MAIN_NONE) : 0;
  options.reserved = rank.wild() && rank.random.one_in(8) ? 1 : 0;
  options.rounding_seed = rank.number(7);
  options.matrix_bytes = rank.number(rank.random.one_in(3) ? uint64_t{256} << rank.random.below(6) : 0);
  options.state_home = rank.exactly(rank.random.one_in(5) ? FSDP_HOME_FILE + 0 : 0);
  options.grad_home = rank.exactly(rank.random.one_in(5) ? FSDP_HOME_FILE + 0 : 0);
  options.home_directory = rank.or_null(".");
  const Input<fsdp_model_options> input(rank, options);
  fsdp_model *made = nullptr;
  const fsdp_status status = make<fsdp_model>(
      rank, a_model, [&](auto **out) { return fsdp_create_model(rank.context(), input.pointer(), out); }, &made);
  if (made) rank.aim.has_home = options.state_home;
  if (made) rank.aim.model = made, rank.main_storages[made] = options.main_storage;
  return status;
}

fsdp_status destroy_model(Rank &rank) {
  fsdp_destroy_model(rank.model());
  return FSDP_OK;
}

fsdp_status set_schedule(Rank &rank) {
  fsdp_visit visits[128];
  for (auto &visit : visits)
    visit = {static_cast<uint32_t>(rank.number(rank.random.below(3))),
             rank.exactly(static_cast<int32_t>(1 + rank.random.below(2))),
             rank.random.one_in(3) ? rank.number32(1) : 0};
  fsdp_schedule_options options = FSDP_SCHEDULE_OPTIONS_INIT;
  options.visits = rank.or_null(visits);
  options.visit_count = std::min<uint64_t>(rank.number(6), 8);
  options.visit_stride = rank.number(sizeof(fsdp_visit));
  // The count never leads beyond the end of the array.
  if (options.visit_stride > 64 && options.visit_stride <= 4096) options.visit_stride = 64;
  const auto kind = static_cast<fsdp_schedule_kind>(1 + rank.random.below(4));
  options.held_groups = rank.number32(kind == FSDP_SCHEDULE_ANY ? static_cast<uint32_t>(rank.random.below(4)) : 0);
  const Input<fsdp_schedule_options> input(rank, options);
  return fsdp_set_schedule(rank.model(), rank.exactly(kind), input.pointer());
}

fsdp_status set_arena(Rank &rank) {
  static constexpr fsdp_role legal[] = {FSDP_ROLE_MAIN, FSDP_ROLE_GRAD, FSDP_ROLE_OPTIMIZER, FSDP_ROLE_GATHER};
  unsigned char *const place = rank.wild() ? rank.arena + 1 + rank.random.below(4000) : rank.arena;
  const uint64_t room = buffer_bytes - static_cast<uint64_t>(place - rank.arena);
  return fsdp_set_arena(rank.model(), rank.exactly(legal[rank.random.below(4)]), rank.or_null(place),
                        std::min(rank.number(room), room));
}

fsdp_status seal_model(Rank &rank) { return fsdp_seal_model(rank.model()); }

fsdp_status get_role_bytes(Rank &rank) {
  Output<uint64_t> bytes(rank);
  return bytes(fsdp_get_role_bytes(rank.model(), rank.choice(FSDP_ROLE_HOME), rank.number32(0), bytes.pointer()));
}

fsdp_status get_allocated_bytes(Rank &rank) {
  Output<uint64_t> bytes(rank);
  return bytes(fsdp_get_allocated_bytes(rank.model(), rank.choice(FSDP_ROLE_HOME), bytes.pointer()));
}

template <class T>
fsdp_status get(Rank &rank, fsdp_status (*call)(const fsdp_model *, T *)) {
  Output<T> out(rank);
  return out(call(rank.model(), out.pointer()));
}

}  // namespace

const std::vector<Case> &model_cases() {
  static const std::vector<Case> cases = {
      {"fsdp_create_model", create_model},
      {"fsdp_destroy_model", destroy_model},
      {"fsdp_set_schedule", set_schedule},
      {"fsdp_add_optimizer_state",
       [](Rank &rank) {
         const char *const name = rank.name();
         const fsdp_status status = fsdp_add_optimizer_state(rank.model(), name, rank.exactly(FSDP_FLOAT32));
         if (status == FSDP_OK) rank.aim.state = name;
         return status;
       }},
      {"fsdp_set_arena", set_arena},
      {"fsdp_check_model",
       [](Rank &rank) {
         return describe(rank,
                         [&](char *buffer, uint64_t *size) { return fsdp_check_model(rank.model(), buffer, size); });
       }},
      {"fsdp_seal_model", seal_model},
      {"fsdp_get_role_bytes", get_role_bytes},
      {"fsdp_get_allocated_bytes", get_allocated_bytes},
      {"fsdp_get_model_info", [](Rank &rank) { return get<fsdp_model_info>(rank, fsdp_get_model_info); }},
      {"fsdp_get_stats", [](Rank &rank) { return get<fsdp_stats>(rank, fsdp_get_stats); }},
      {"fsdp_describe_model",
       [](Rank &rank) {
         return describe(rank,
                         [&](char *buffer, uint64_t *size) { return fsdp_describe_model(rank.model(), buffer, size); });
       }},
      {"fsdp_get_matrix_plan",
       [](Rank &rank) {
         return describe(
             rank, [&](char *buffer, uint64_t *size) { return fsdp_get_matrix_plan(rank.model(), buffer, size); });
       }},
      {"fsdp_begin_capture", [](Rank &rank) { return fsdp_begin_capture(rank.model(), rank.stream()); }, false},
      {"fsdp_end_capture",
       [](Rank &rank) {
         return make<fsdp_capture>(rank, a_capture,
                                   [&](auto **out) { return fsdp_end_capture(rank.model(), rank.stream(), out); });
       },
       false},
      {"fsdp_prepare_replay",
       [](Rank &rank) { return fsdp_prepare_replay(rank.capture(), rank.real(0.1), rank.stream()); }, false},
      {"fsdp_commit_replay", [](Rank &rank) { return fsdp_commit_replay(rank.capture(), rank.stream()); }, false},
      {"fsdp_cancel_replay", [](Rank &rank) { return fsdp_cancel_replay(rank.capture(), rank.stream()); }, false},
      {"fsdp_destroy_capture", [](Rank &rank) -> fsdp_status { return fsdp_destroy_capture(rank.capture()), FSDP_OK; }},
  };
  return cases;
}

}  // namespace fuzz
