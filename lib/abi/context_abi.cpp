// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <thread>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/text.h"
#include "engine/context/environment.h"
#include "transport/team.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

// Options that matter only on a GPU are also checked without one, so that planning a GPU run finds its errors.
void read_device(fsdp_context_options &options, const char *call) {
  options.device =
      read_enum(options.device, FSDP_DEVICE_HOST + 0, FSDP_DEVICE_CUDA + 0, call, "fsdp_context_options.device");
  if (options.device_index < 0)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: fsdp_context_options.device_index is {}; it is FSDP_DEVICE_INDEX(i) for GPU i, or 0 for the "
         "calling thread's current one",
         call, options.device_index);
  if (options.device == FSDP_DEVICE_HOST) options.device_transport = 0;  // has no effect on the host
  options.device_transport =
      read_enum(options.device_transport, 0, FSDP_TRANSPORT_STAGING + 0, call, "fsdp_context_options.device_transport");
}

fsdp_context_options read_context_options(const fsdp_context_options *given, const char *call) {
  auto options = read_options(given, call, "fsdp_context_options");
  engine::read_environment(options);
  check_flags(options.flags, FSDP_CONTEXT_DEBUG | FSDP_CONTEXT_NO_OVERLAP | FSDP_CONTEXT_TRACE, call,
              "fsdp_context_options.flags");
  read_device(options, call);
  options.log_level =
      read_enum(options.log_level, FSDP_LOG_WARNING + 0, FSDP_LOG_DEBUG + 0, call, "fsdp_context_options.log_level");
  if (options.world_size && options.rank >= options.world_size)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_context_options.rank: rank {} is outside [0, {})", call, options.rank,
         options.world_size);
  if (options.trace_events > trace::Timeline::max_capacity)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_context_options.trace_events is {}, at most {} can be kept", call,
         options.trace_events, trace::Timeline::max_capacity);
  if (options.flight_events > trace::FlightRecorder::max_capacity)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_context_options.flight_events is {}, at most {} can be kept", call,
         options.flight_events, trace::FlightRecorder::max_capacity);
  return options;
}

fsdp_context *make_handle(std::shared_ptr<engine::Context> impl) {
  return NewHandle<fsdp_context>(std::move(impl)).give_out();
}

layout::Mesh make_mesh(const engine::Context &context, const fsdp_mesh_options &given, const char *call) {
  layout::MeshRequest request;
  if (given.rank_count && !given.ranks)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_mesh_options.rank_count is {}, but ranks is NULL", call, given.rank_count);
  if (given.ranks)
    request.ranks.assign(given.ranks, given.ranks + given.rank_count);
  else
    for (uint32_t rank = 0; rank < context.world_size(); ++rank) request.ranks.push_back(rank);
  for (const uint32_t rank : request.ranks)
    if (rank >= context.world_size())
      fail(FSDP_INVALID_ARGUMENT, "{}: rank {} of fsdp_mesh_options.ranks is outside [0, {})", call, rank,
           context.world_size());
  if (std::find(request.ranks.begin(), request.ranks.end(), context.rank()) == request.ranks.end())
    fail(FSDP_INVALID_ARGUMENT,
         "{}: this rank, {}, is not in fsdp_mesh_options.ranks; each rank makes the meshes that it is in", call,
         context.rank());
  request.hosts = context.hosts_of(request.ranks);
  request.replicate_size = given.replicate_size;
  request.shard_size = given.shard_size;
  request.reduction_block = given.reduction_block_size;
  try {
    return layout::arrange_mesh(std::move(request));
  } catch (const Error &error) {
    fail(error.status, "{}: {}", call, error.message);
  }
}

}  // namespace

extern "C" {

fsdp_status fsdp_create_context(const fsdp_context_options *options, fsdp_context **context) {
  constexpr auto call = "fsdp_create_context";
  if (context) *context = nullptr;
  return guard([&] {
    check_pointer(context, call, "context");
    *context = make_handle(engine::Context::create(read_context_options(options, call)));
  });
}

fsdp_status fsdp_create_local_contexts(uint32_t world_size, const fsdp_context_options *options,
                                       fsdp_context **contexts) {
  constexpr auto call = "fsdp_create_local_contexts";
  constexpr uint32_t max_ranks = 1024;
  if (contexts && world_size <= membership::max_ranks) std::fill_n(contexts, world_size, nullptr);
  return guard([&] {
    check_pointer(contexts, call, "contexts");
    if (world_size < 1 || world_size > max_ranks)
      fail(FSDP_INVALID_ARGUMENT, "{}: world_size is {}, it must be in [1, {}]", call, world_size, max_ranks);
    auto given = read_options(options, call, "fsdp_context_options");
    given.world_size = given.rank = 0;
    const auto checked = read_context_options(&given, call);
    std::vector<NewHandle<fsdp_context>> handles;
    for (auto &impl : engine::Context::create_local(world_size, checked)) handles.emplace_back(std::move(impl));
    for (uint32_t rank = 0; rank < world_size; ++rank) contexts[rank] = handles[rank].give_out();
  });
}

fsdp_status fsdp_create_plan_context(uint32_t world_size, uint32_t rank, const fsdp_context_options *options,
                                     fsdp_context **context) {
  constexpr auto call = "fsdp_create_plan_context";
  if (context) *context = nullptr;
  return guard([&] {
    check_pointer(context, call, "context");
    if (world_size < 1 || world_size > membership::max_ranks)
      fail(FSDP_INVALID_ARGUMENT, "{}: world_size is {}, it must be in [1, {}], as that of a job", call, world_size,
           membership::max_ranks);
    if (rank >= world_size) fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is outside [0, {})", call, rank, world_size);
    *context = make_handle(engine::Context::create_planning(world_size, rank, read_context_options(options, call)));
  });
}

fsdp_status fsdp_close_context(fsdp_context *context) {
  return call_context(context, "fsdp_close_context", [](auto &impl) { impl->close(); });
}

fsdp_status fsdp_abort_context(fsdp_context *context, const char *reason) {
  return guard([&] {
    const auto impl = acquire(context, "fsdp_abort_context");
    impl->check_process();
    impl->abort(reason ? as_utf8(reason) : "no reason given");
  });
}

void fsdp_destroy_context(fsdp_context *context) {
  const auto impl = find(context);
  if (!impl) return;
  if (impl->in_child()) return forget(context);
  if (remove(context)) impl->shut_down();
}

fsdp_status fsdp_get_rank(const fsdp_context *context, uint32_t *rank) {
  return guard([&] {
    const auto impl = acquire(context, "fsdp_get_rank");
    *check_pointer(rank, "fsdp_get_rank", "rank") = impl->rank();
  });
}

fsdp_status fsdp_get_world_size(const fsdp_context *context, uint32_t *world_size) {
  return guard([&] {
    const auto impl = acquire(context, "fsdp_get_world_size");
    *check_pointer(world_size, "fsdp_get_world_size", "world_size") = impl->world_size();
  });
}

fsdp_status fsdp_all_reduce_values(fsdp_context *context, const fsdp_mesh *mesh, double *values, uint64_t value_count,
                                   fsdp_value_op op) {
  constexpr auto call = "fsdp_all_reduce_values";
  return call_context(context, call, [&](auto &impl) {
    if (value_count) check_pointer(values, call, "values");
    if (value_count > engine::ValueReducer::max_values)
      fail(FSDP_INVALID_ARGUMENT, "{}: value_count is {}, at most {} are allowed", call, value_count,
           engine::ValueReducer::max_values);
    if (op < FSDP_VALUE_SUM || op > FSDP_VALUE_MEAN)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is not an fsdp_value_op", call, op);
    impl->all_reduce(mesh_of(mesh, *impl, call).get(), values, value_count, op, call);
  });
}

fsdp_status fsdp_create_mesh(fsdp_context *context, const fsdp_mesh_options *options, fsdp_mesh **mesh) {
  constexpr auto call = "fsdp_create_mesh";
  if (mesh) *mesh = nullptr;
  return call_context(context, call, [&](auto &impl) {
    check_pointer(mesh, call, "mesh");
    const auto given = read_options(options, call, "fsdp_mesh_options");
    *mesh = NewHandle<fsdp_mesh>(std::make_shared<HandledMesh>(impl, make_mesh(*impl, given, call))).give_out();
  });
}

void fsdp_destroy_mesh(fsdp_mesh *mesh) {
  const auto impl = find(mesh);
  if (!impl) return;
  if (impl->context->in_child()) return forget(mesh);
  remove(mesh);
}

}  // extern "C"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

// If the caller's own limit runs out, only this call ends, and the context goes on.
void await_within(engine::Context &context, const device::Event &event, uint32_t timeout_ms, const char *call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (auto pause = std::chrono::microseconds(20); !event.done();
       pause = std::min(pause * 2, std::chrono::microseconds(1000))) {
    context.waiter().poll();
    if (std::chrono::steady_clock::now() >= end) {
      Error error(FSDP_TIMEOUT, format_text("{}: what rank {} gave the stream has not ended within timeout_ms = {}",
                                            call, context.rank(), timeout_ms));
      error.ends_context = false;
      throw error;
    }
    std::this_thread::sleep_for(pause);
  }
  context.failure().check();
}

// Each call uses its own event. If the event is never reached, the device keeps it until the end of the event's stream.
void wait_stream(engine::Context &context, fsdp_stream handle, uint32_t timeout_ms, const char *call) {
  context.require_world(call);
  device::Stream &stream = context.device().caller_stream(handle);
  if (stream.is_calling_thread()) return;  // all of its work is already done
  if (stream.capture_id() != 0)
    fail(FSDP_INVALID_STATE,
         "{}: the stream of rank {} is being captured into a graph, and nothing of that is done yet", call,
         context.rank());
  const auto end = context.device().create_event();
  stream.record(*end);
  if (timeout_ms)
    await_within(context, *end, timeout_ms, call);
  else
    context.device().synchronize(*end);
}

}  // namespace

extern "C" fsdp_status fsdp_wait_stream(fsdp_context *context, fsdp_stream stream, uint32_t timeout_ms) {
  constexpr auto call = "fsdp_wait_stream";
  return call_context(context, call, [&](auto &impl) { wait_stream(*impl, stream, timeout_ms, call); });
}

using namespace fsdp;
using namespace fsdp::abi;

extern "C" {

fsdp_status fsdp_write_trace(const fsdp_context *context, const char *path) {
  constexpr auto call = "fsdp_write_trace";
  return call_beside(context, call, [&](const engine::Context &impl) {
    if (*check_pointer(path, call, "path") == 0) fail(FSDP_INVALID_ARGUMENT, "{}: path is empty", call);
    impl.write_trace(path);
  });
}

fsdp_status fsdp_write_flight_record(const fsdp_context *context, const char *path) {
  constexpr auto call = "fsdp_write_flight_record";
  return call_beside(context, call, [&](const engine::Context &impl) {
    if (*check_pointer(path, call, "path") == 0) fail(FSDP_INVALID_ARGUMENT, "{}: path is empty", call);
    impl.write_flight_record(path);
  });
}

fsdp_status fsdp_begin_span(fsdp_context *context, const char *name) {
  constexpr auto call = "fsdp_begin_span";
  return call_context(context, call, [&](auto &impl) {
    check_pointer(name, call, "name");
    trace::CallerSpans *spans = impl->caller_spans();
    if (!spans) return;
    const char *known = spans->find(name);
    spans->begin(known ? known : spans->add(read_name(name, 255, call, "name")));
  });
}

fsdp_status fsdp_end_span(fsdp_context *context) {
  return call_context(context, "fsdp_end_span", [](auto &impl) {
    if (trace::CallerSpans *spans = impl->caller_spans()) spans->end();
  });
}

}  // extern "C"
