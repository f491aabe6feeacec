// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <utility>

#include "memory.h"

namespace fuzz {
namespace {

std::atomic<int32_t> interrupted_flag{0};
int32_t never_interrupted(void *) { return 0; }
int32_t always_interrupted(void *) { return 1; }
void log_line(void *, fsdp_log_level, const char *message) { read_all(message, std::strlen(message)); }

void choose_what_is_kept(Rank &rank, fsdp_context_options &options) {
  if (rank.random.one_in(4)) options.log = log_line;
  options.log_level = rank.choice(FSDP_LOG_DEBUG);
  options.trace_events = rank.random.below(2000);
  options.flight_events = static_cast<uint32_t>(rank.random.below(500));
  if (rank.wild()) options.trace_events = UINT64_MAX - rank.random.below(1000);
  if (rank.wild()) options.flight_events = UINT32_MAX - static_cast<uint32_t>(rank.random.below(1000));
  if (rank.random.one_in(64)) options.trace_directory = "fuzz-traces";
  if (rank.wild()) options.flight_directory = "fuzz-none/at/all";
}

fsdp_context_options choose_options(Rank &rank) {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.flags = rank.flags(FSDP_CONTEXT_DEBUG | FSDP_CONTEXT_NO_OVERLAP | FSDP_CONTEXT_TRACE);
  options.ranks_per_host = rank.plans ? rank.number32(static_cast<uint32_t>(rank.random.below(3))) : rank.number32(0);
  options.device = rank.random.one_in(rank.plans ? 4 : 64) ? FSDP_DEVICE_CUDA : rank.exactly(FSDP_DEVICE_HOST);
  options.device_index = rank.exactly(0);
  options.device_transport = rank.choice(FSDP_TRANSPORT_STAGING);
  options.timeout_ms = rank.timeout_ms;
  options.heartbeat_timeout_ms = rank.number32(0);
  choose_what_is_kept(rank, options);
  options.interrupted_flag = rank.random.one_in(4) ? reinterpret_cast<const int32_t *>(&interrupted_flag) : nullptr;
  if (rank.random.one_in(4)) options.interrupted = rank.wild() ? always_interrupted : never_interrupted;
  options.debug_delay_us = rank.random.one_in(16) ? static_cast<uint32_t>(rank.random.below(20)) : 0;
  options.debug_delay_seed = rank.random.next();
  options.debug_failed_allocation = rank.wild() ? rank.random.below(16) : 0;
  return options;
}

// Destroys a context if there are three, because each has threads and memory of its own.
void make_room(Rank &rank) {
  auto &contexts = rank.alive[a_context];
  if (contexts.size() < 3) return;
  fsdp_destroy_context(static_cast<fsdp_context *>(contexts.back()));
  contexts.pop_back();
}

fsdp_status create_context(Rank &rank) {
  make_room(rank);
  fsdp_context_options options = choose_options(rank);
  options.world_size = rank.wild() ? 1 + static_cast<uint32_t>(rank.random.below(2)) : rank.choice(1) != 0;
  options.rank = options.world_size > 1 ? static_cast<uint32_t>(rank.random.below(4)) : rank.number32(0);
  if (options.world_size > 1) options.timeout_ms = 5;
  options.rendezvous = rank.wild() ? rank.name() : options.world_size > 1 ? "fsdp-abi-fuzzer" : nullptr;
  const Input<fsdp_context_options> input(rank, options);
  return make<fsdp_context>(rank, a_context, [&](auto **out) { return fsdp_create_context(input.pointer(), out); });
}

fsdp_status create_local_contexts(Rank &rank) {
  make_room(rank);
  std::vector<fsdp_context *> made(2048, reinterpret_cast<fsdp_context *>(uintptr_t{0xA5}));
  const uint32_t count = !rank.wild()            ? 1
                         : rank.random.one_in(2) ? 0
                                                 : 1025 + static_cast<uint32_t>(rank.random.below(1000));
  const Input<fsdp_context_options> input(rank, choose_options(rank));
  auto *const place = rank.or_null(made.data());
  const fsdp_status status = fsdp_create_local_contexts(count, input.pointer(), place);
  for (uint32_t i = 0; place && i < count; ++i) {
    require((status == FSDP_OK) == (made[i] != nullptr),
            "fsdp_create_local_contexts: a handle and an error, or neither");
    if (made[i]) rank.add(a_context, made[i]);
  }
  require(made[place ? count : 0] == reinterpret_cast<fsdp_context *>(uintptr_t{0xA5}),
          "a handle too many was written");
  return status;
}

fsdp_status create_plan_context(Rank &rank) {
  make_room(rank);
  const bool were_plans = std::exchange(rank.plans, true);
  const Input<fsdp_context_options> input(rank, choose_options(rank));
  rank.plans = were_plans;
  const uint32_t size = static_cast<uint32_t>(1 + rank.random.below(rank.random.one_in(50) ? 4096 : 32));
  const uint32_t mine = rank.number32(static_cast<uint32_t>(rank.random.below(size)));
  const uint32_t world_size = rank.wild() ? 0 : size;
  return make<fsdp_context>(
      rank, a_context, [&](auto **out) { return fsdp_create_plan_context(world_size, mine, input.pointer(), out); });
}

fsdp_status all_reduce_values(Rank &rank) {
  double values[513], before[513];
  const uint64_t count = rank.wild() ? 513 + rank.nonsense() % 1000 : rank.random.below(513);
  for (double &value : values) value = rank.real(1.5);
  std::memcpy(before, values, sizeof values);
  auto *const mesh = rank.random.one_in(2) ? nullptr : rank.mesh();
  const fsdp_value_op op = rank.exactly(static_cast<int32_t>(1 + rank.random.below(4)));
  const fsdp_status status = fsdp_all_reduce_values(rank.context(), mesh, rank.or_null(values), count, op);
  const uint64_t first = status == FSDP_OK ? count : 0;
  require(!std::memcmp(values + first, before + first, (513 - first) * sizeof(double)),
          "values were written that may not be");
  return status;
}

fsdp_status create_mesh(Rank &rank) {
  uint32_t ranks[64];
  for (uint32_t i = 0; i < 64; ++i) ranks[i] = rank.number32(i);
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.replicate_size = rank.number32(rank.random.one_in(4) ? 2 : 0);
  options.shard_size = rank.number32(0);
  options.ranks = rank.random.one_in(3) ? ranks : nullptr;
  options.rank_count =
      static_cast<uint32_t>(options.ranks ? std::min<uint64_t>(rank.number(rank.world_size), 64) : rank.number(0));
  options.reduction_block_size = rank.number32(0);
  const Input<fsdp_mesh_options> input(rank, options);
  return make<fsdp_mesh>(rank, a_mesh,
                         [&](auto **out) { return fsdp_create_mesh(rank.context(), input.pointer(), out); });
}

template <class T>
fsdp_status get(Rank &rank, fsdp_status (*call)(const fsdp_context *, T *)) {
  Output<T> out(rank);
  fsdp_context *const context = rank.context();
  return out(call(context, out.pointer()));
}

fsdp_status destroy_context(Rank &rank) {
  fsdp_destroy_context(rank.context());
  return FSDP_OK;
}

fsdp_status destroy_mesh(Rank &rank) {
  fsdp_destroy_mesh(rank.mesh());
  return FSDP_OK;
}

fsdp_status get_status_name(Rank &rank) {
  const char *const name = fsdp_get_status_name(rank.exactly(FSDP_TIMEOUT));
  require(name && *name, "fsdp_get_status_name: no name");
  return FSDP_OK;
}

fsdp_status get_last_message(Rank &) {
  fsdp_error error = FSDP_ERROR_INIT;
  const char *const message = fsdp_get_last_message();
  require(message && fsdp_get_last_error(nullptr, &error) == FSDP_OK, "fsdp_get_last_message: no message");
  require(!std::strncmp(message, error.message, std::strlen(error.message)),
          "fsdp_get_last_message: not that of the last error");
  return FSDP_OK;
}

// Passes an array with its capacity. Elements behind the written ranks must stay unchanged.
fsdp_status get_failed_ranks(Rank &rank) {
  uint32_t ranks[8];
  std::fill_n(ranks, 8, 0xA5A5A5A5U);
  const uint64_t room = rank.random.below(9);
  uint64_t count = room;
  const fsdp_status status = fsdp_get_failed_ranks(rank.context(), rank.or_null(ranks), rank.or_null(&count));
  const uint64_t written = status == FSDP_OK ? std::min(count, room) : 0;
  for (uint64_t i = written; i < 8; ++i) require(ranks[i] == 0xA5A5A5A5U, "a rank too many was written");
  return status;
}

const char *path_of(Rank &rank) {
  return rank.wild() ? rank.name() : rank.random.one_in(4) ? "fuzz-none/at/all" : "fuzz-traces/file.json";
}

}  // namespace

const std::vector<Case> &context_cases() {
  static const std::vector<Case> cases = {
      {"fsdp_get_last_error",
       [](Rank &rank) {
         if (rank.random.one_in(2)) return get<fsdp_error>(rank, fsdp_get_last_error);
         Output<fsdp_error> error(rank);
         return error(fsdp_get_last_error(nullptr, error.pointer()));
       }},
      {"fsdp_get_last_message", get_last_message},
      {"fsdp_get_status_name", get_status_name},
      {"fsdp_get_version", [](Rank &) -> fsdp_status { return require(fsdp_get_version(), "no version"), FSDP_OK; }},
      {"fsdp_describe_build", [](Rank &rank) { return describe(rank, fsdp_describe_build); }},
      {"fsdp_get_dtype_size",
       [](Rank &rank) -> fsdp_status {
         return require(fsdp_get_dtype_size(rank.choice(4)) <= 4, "a size of a dtype"), FSDP_OK;
       }},
      {"fsdp_create_context", create_context},
      {"fsdp_create_local_contexts", create_local_contexts},
      {"fsdp_create_plan_context", create_plan_context},
      {"fsdp_close_context", [](Rank &rank) { return fsdp_close_context(rank.context()); }},
      {"fsdp_abort_context", [](Rank &rank) { return fsdp_abort_context(rank.context(), rank.name()); }},
      {"fsdp_destroy_context", destroy_context},
      {"fsdp_get_rank", [](Rank &rank) { return get<uint32_t>(rank, fsdp_get_rank); }},
      {"fsdp_get_world_size", [](Rank &rank) { return get<uint32_t>(rank, fsdp_get_world_size); }},
      {"fsdp_get_context_error", [](Rank &rank) { return get<fsdp_error>(rank, fsdp_get_context_error); }},
      {"fsdp_get_failed_ranks", get_failed_ranks},
      {"fsdp_all_reduce_values", all_reduce_values},
      {"fsdp_wait_stream",
       [](Rank &rank) { return fsdp_wait_stream(rank.context(), rank.stream(), rank.number32(0)); }},
      {"fsdp_create_mesh", create_mesh},
      {"fsdp_destroy_mesh", destroy_mesh},
      {"fsdp_write_trace", [](Rank &rank) { return fsdp_write_trace(rank.context(), path_of(rank)); }},
      {"fsdp_write_flight_record", [](Rank &rank) { return fsdp_write_flight_record(rank.context(), path_of(rank)); }},
      {"fsdp_begin_span", [](Rank &rank) { return fsdp_begin_span(rank.context(), rank.name()); }},
      {"fsdp_end_span", [](Rank &rank) { return fsdp_end_span(rank.context()); }},
  };
  return cases;
}

}  // namespace fuzz
