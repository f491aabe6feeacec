// SPDX-License-Identifier: Apache-2.0
#include "engine/context/context.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <numeric>

#include "base/mapping.h"
#include "engine/context/environment.h"
#include "membership/join/rank_links.h"
#include "membership/wire/secret.h"
#include "trace/timeline.h"
#include "transport/net.h"

namespace fsdp::engine {
namespace {

constexpr uint32_t default_timeout_ms = 300'000;
constexpr uint32_t default_heartbeat_timeout_ms = 8000;
constexpr uint32_t least_heartbeat_timeout_ms = 1000;  // four heartbeats

device::Options device_options(const fsdp_context_options &options, uint32_t rank) {
  device::Options device;
  device.overlap = !(options.flags & FSDP_CONTEXT_NO_OVERLAP);
  device.delay_us = options.debug_delay_us;
  device.delay_seed = options.debug_delay_seed * 1'000'003 + rank;
  device.failed_allocation = options.debug_failed_allocation;
  return device;
}

// Creates the device. The device of a context that only plans does nothing.
std::unique_ptr<device::Device> create_device(const fsdp_context_options &options, uint32_t rank, bool plans,
                                              const Waiter &waiter, Failure &failure,
                                              std::function<void(const std::string &)> warn) {
  device::Options chosen = device_options(options, rank);
  chosen.warn = std::move(warn);
  if (plans || options.device != FSDP_DEVICE_CUDA) return device::create_host_device(chosen, waiter, failure);
  return device::create_cuda_device(options.device_index - 1, chosen, waiter, failure);
}

uint32_t heartbeat_timeout_ms(const fsdp_context_options &options) {
  const uint32_t ms = options.heartbeat_timeout_ms ? options.heartbeat_timeout_ms : default_heartbeat_timeout_ms;
  if (ms < least_heartbeat_timeout_ms)
    fail(FSDP_INVALID_ARGUMENT, "fsdp_context_options.heartbeat_timeout_ms: {}; it is at least {}", ms,
         least_heartbeat_timeout_ms);
  return ms;
}

}  // namespace

ForkGuard::ForkGuard() {
  void *page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail_errno(errno, "mapping the fork guard");
  if (::madvise(page, 4096, MADV_WIPEONFORK) != 0) {
    const int code = errno;
    ::munmap(page, 4096);
    fail_errno(code, "madvise(MADV_WIPEONFORK) on the fork guard");
  }
  word_ = static_cast<volatile uint32_t *>(page);
  *word_ = 1;
}

ForkGuard::~ForkGuard() { ::munmap(const_cast<uint32_t *>(word_), 4096); }

Context::Context(const fsdp_context_options &options, uint32_t rank, uint32_t world_size, bool plans)
    : options_(options),
      rank_(rank),
      world_size_(world_size),
      waiter_(failure_, options.interrupted, options.interrupted_data,
              options.timeout_ms ? options.timeout_ms : default_timeout_ms, options.interrupted_flag),
      flight_log_(options, rank, world_size, plans),
      log_queue_(options.log, options.log == log_to_standard_error ? &rank_ : options.log_data,
                 options.log_level ? options.log_level : FSDP_LOG_WARNING),
      device_(create_device(
          options, rank, plans, waiter_, failure_,
          [this](const std::string &text) { log(FSDP_LOG_WARNING, format_text("rank {}: {}", rank_, text)); })),
      values_(*this, flight_log_.recorder()) {
  heartbeat_timeout_ms(options_);  // checked even without heartbeats, so that a plan finds the errors of a run
  options_.rendezvous = options_.flight_directory = options_.trace_directory =
      nullptr;  // the caller's strings need not outlive the call
}

// Teams and the world refer to the device and the failure, so they end first. The device ends here because it may still
// log: the program may destroy its log as soon as the call that destroys the context returns.
Context::~Context() {
  values_.clear();
  world_.reset();
  device_.reset();
  if (ends_with_its_handle_) log_queue_.flush();
}

std::shared_ptr<Context> Context::create(const fsdp_context_options &options) {
  membership::WorldOptions world;
  const membership::WipedText wiped(world.secret);
  if (options.world_size) {
    world.rank = options.rank;
    world.size = options.world_size;
    if (world.rank >= world.size)
      fail(FSDP_INVALID_ARGUMENT, "fsdp_context_options.rank: rank {} is outside [0, {})", world.rank, world.size);
    if (options.rendezvous) world.rendezvous = options.rendezvous;
    membership::complete_world(world);
  } else {
    world = membership::read_launcher_environment();
  }
  world.timeout_ms = options.timeout_ms ? options.timeout_ms : default_timeout_ms;
  world.heartbeat_timeout_ms = heartbeat_timeout_ms(options);
  if (world.size > 1) {
    Failure failure;
    membership::check_kernel(world, Waiter(failure, options.interrupted, options.interrupted_data, world.timeout_ms,
                                           options.interrupted_flag));
  }
  std::shared_ptr<Context> context(new Context(options, world.rank, world.size));
  populate_machine_code();
  context->check_directories();
  // These lines are logged at once, because a rank that rank 0 refuses may keep the other ranks waiting until the
  // timeout.
  world.log = [&](fsdp_log_level level, const std::string &text) {
    context->log(level, format_text("rank {}: {}", world.rank, text));
    context->log_queue_.flush();
  };
  // Teams end before their context does.
  world.log_later = [to = context.get()](fsdp_log_level level, const std::string &text) {
    to->log(level, format_text("rank {}: {}", to->rank(), text));
  };
  context->world_ = transport::create_process_world(world, context->waiter_, context->failure_, *context->device_);
  context->log_device();
  context->log(FSDP_LOG_INFO, format_text("rank {} of {}: {}", world.rank, world.size, context->world_->description()));
  if (const std::string warnings = context->world_->warnings(); !warnings.empty())
    context->log(FSDP_LOG_WARNING, format_text("rank {}: {}", world.rank, warnings));
  return context;
}

std::vector<std::shared_ptr<Context>> Context::create_local(uint32_t world_size, const fsdp_context_options &options) {
  populate_machine_code();
  auto job = transport::create_local_job(world_size);
  std::vector<std::shared_ptr<Context>> contexts;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    contexts.emplace_back(new Context(options, rank, world_size));
    Context &context = *contexts.back();
    context.check_directories();
    context.world_ = transport::create_local_world(job, rank, context.waiter_, context.failure_, *context.device_);
    context.log_device();
  }
  return contexts;
}

std::shared_ptr<Context> Context::create_planning(uint32_t world_size, uint32_t rank,
                                                  const fsdp_context_options &options) {
  fsdp_context_options own = options;
  own.flight_events = 2;  // a plan has nothing to record
  own.flight_directory = "";
  return std::shared_ptr<Context>(new Context(own, rank, world_size, true));
}

void Context::log_device() {
  if (device_->index() >= 0) log(FSDP_LOG_INFO, format_text("rank {}: {}", rank_, device_->description()));
}

void Context::write_trace(const std::string &path) const {
  require_world("fsdp_write_trace");
  flight_log_.write_trace(path);
}

void Context::require_world(const char *call) const {
  if (planning())
    fail(FSDP_INVALID_STATE, "{}: this context only plans (fsdp_create_plan_context); it has no data", call);
}

void Context::require_open(const char *call) const {
  require_world(call);
  if (closed_) fail(FSDP_INVALID_STATE, "{}: rank {} has closed this context; destroy it", call, rank_);
}

void Context::require_no_other_capture(const Runtime *model, const char *call) const {
  if (const Runtime *captured = captured_; captured && captured != model)
    fail(FSDP_INVALID_STATE,
         "{}: another model of this context is being captured into a graph, which this call could spoil; make it "
         "after that model's fsdp_end_capture",
         call);
}

bool Context::run_alone(const std::function<void()> &body) {
  if (inside_.exchange(true, std::memory_order_acquire)) return false;
  const auto error = capture_error(body);
  inside_.store(false, std::memory_order_release);
  if (error) throw *error;
  return true;
}

void Context::close() {
  require_world("fsdp_close_context");
  if (closed_)
    fail(FSDP_INVALID_STATE, "fsdp_close_context: rank {} has closed this context before; destroy it", rank_);
  // The save ends first, because it may hold the last reference to a model.
  const auto unsaved = capture_error([&] {
    if (const auto save = checkpoint_slot_.get()) save->wait("fsdp_close_context");
  });
  if (unsaved && unsaved->status == FSDP_INTERRUPTED) throw *unsaved;
  if (unsaved) log(FSDP_LOG_WARNING, format_text("rank {}: a checkpoint has failed: {}", rank_, unsaved->message));
  const auto find = [this](std::string (OpenModel::*question)() const) {
    const std::lock_guard lock(mutex_);  // a model may be destroyed by another thread now
    for (const OpenModel *model : models_)
      if (std::string what = (model->*question)(); !what.empty()) return what;
    return std::string();
  };
  if (const std::string graph = find(&OpenModel::open_graph); !graph.empty())
    fail(FSDP_INVALID_STATE, "fsdp_close_context: a model of rank {} has a graph under way: {}", rank_, graph);
  if (const std::string unfinished = find(&OpenModel::unfinished); !unfinished.empty())
    fail(FSDP_INVALID_STATE,
         "fsdp_close_context: a model of rank {} is in the middle of a step ({}); end it with fsdp_finish_grads and a "
         "publish, "
         "or with fsdp_discard_step",
         rank_, unfinished);
  failure_.check();
  values_.barrier(world_ranks(), "fsdp_close_context");
  world_->leave();
  closed_ = true;
  if (unsaved) throw *unsaved;
}

void Context::add_model(const OpenModel *model) {
  std::lock_guard lock(mutex_);
  models_.push_back(model);
  if (models_.size() > 1) has_several_models_.store(true, std::memory_order_relaxed);
}

void Context::remove_model(const OpenModel *model) noexcept {
  std::lock_guard lock(mutex_);
  std::erase(models_, model);
}

void Context::log(fsdp_log_level level, const std::string &message) noexcept { log_queue_.add(level, message); }

void Context::log_now(fsdp_log_level level, const std::string &message) noexcept {
  log_queue_.add(level, message);
  log_queue_.flush();
}

void Context::check_process() const {
  if (in_child())
    fail(FSDP_INVALID_STATE,
         "this process is a fork of the one that made the context of rank {}; make a new context here", rank_);
}

void Context::check_handle(const char *call) const {
  if (handle_destroyed_.load(std::memory_order_acquire))
    fail(FSDP_INVALID_HANDLE,
         "{}: the context of rank {} has been destroyed; what was made from it can only be destroyed", call, rank_);
}

// ---- the ranks of the job ----

std::unique_ptr<transport::Team> Context::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  return world_->create_team(ranks, what);
}

transport::DeviceTransport Context::transport() const noexcept {
  if (device_traits().host_memory) return transport::DeviceTransport::none;
  switch (options_.device_transport) {
    case FSDP_TRANSPORT_NCCL: return transport::DeviceTransport::nccl;
    case FSDP_TRANSPORT_STAGING: return transport::DeviceTransport::staging;
    default: return transport::DeviceTransport::automatic;
  }
}

std::shared_ptr<transport::Team> Context::create_device_team(std::shared_ptr<transport::Team> team,
                                                             transport::DeviceTransport transport) {
  auto made = transport::create_device_team(std::move(team), *device_, transport, waiter_, failure_);
  for (const transport::Note &note : made->notes()) log(note.level, note.text);
  return made;
}

uint64_t Context::message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  return world_ ? world_->message_bytes(ranks, sums) : planned_message_bytes(ranks, sums);
}

uint64_t Context::planned_message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  const auto count = static_cast<uint32_t>(ranks.size());
  const std::vector<uint32_t> hosts = hosts_of(ranks);
  if (std::count(hosts.begin(), hosts.end(), hosts[0]) == count) return transport::message_staging_bytes(count);
  return sums ? transport::net_scratch_bytes(count, transport::read_net_chunk_bytes()) : 0;
}

std::vector<uint32_t> Context::hosts_of(std::span<const uint32_t> ranks) const {
  const uint32_t pretended = options_.ranks_per_host;
  std::vector<uint32_t> hosts;
  for (const uint32_t rank : ranks) {
    const uint32_t host = world_ ? world_->host_of(rank) : 0;
    if (pretended && host)
      fail(FSDP_INVALID_ARGUMENT,
           "fsdp_context_options.ranks_per_host is {}, but rank {} is on another host than rank 0 already", pretended,
           rank);
    hosts.push_back(pretended ? rank / pretended : host);
  }
  return hosts;
}

const std::vector<uint32_t> &Context::world_ranks() {
  if (world_ranks_.empty()) {
    world_ranks_.resize(world_size_);
    std::iota(world_ranks_.begin(), world_ranks_.end(), 0u);
  }
  return world_ranks_;
}

std::span<const ValueReducer::ValueMessage> Context::exchange_values(const layout::Mesh *mesh, const double *values,
                                                                     uint64_t count, fsdp_value_op op,
                                                                     const char *call) {
  require_open(call);
  return values_.exchange(mesh ? mesh->ranks : world_ranks(), values, count, op, call);
}

void Context::all_reduce(const layout::Mesh *mesh, double *values, uint64_t count, fsdp_value_op op, const char *call) {
  require_open(call);
  values_.all_reduce(mesh ? mesh->ranks : world_ranks(), values, count, op, call);
}

// ---- how the context fails for good, and what it then writes ----

void Context::check_directories() {
  for (const std::string &problem : flight_log_.directory_problems()) log(FSDP_LOG_WARNING, problem);
}

void Context::write_trace_at_end() noexcept {
  try {
    if (const std::string problem = flight_log_.write_last_trace(); !problem.empty()) log(FSDP_LOG_WARNING, problem);
  } catch (...) {  // out of memory: the trace is lost
  }
  flush_log_outside();
}

// Flushes the log unless a thread is inside the context; that thread's call flushes it when it ends.
void Context::flush_log_outside() noexcept {
  if (inside_.exchange(true, std::memory_order_acquire)) return;
  log_queue_.flush();
  inside_.store(false, std::memory_order_release);
}

void Context::write_flight_record(const std::string &path) const {
  require_world("fsdp_write_flight_record");
  flight_log_.write_record(path, failure_.get());
}

// The job's verdict is in memory that this rank shares with the ranks of its host, or with peers that are threads of
// its process.
bool Context::look_for_failure() const noexcept {
  if (!failure_.failed() && world_ && !closed_.load(std::memory_order_relaxed) && !in_child()) {
    try {
      world_->check();
    } catch (...) {  // check() has set the failure
    }
  }
  return failure_.failed();
}

void Context::record_failure() noexcept {
  try {
    const std::string line = flight_log_.write_failure(*failure_.get());
    if (line.empty()) return;
    log(FSDP_LOG_ERROR, line);
  } catch (...) {  // out of memory: the call still reports the failure
  }
  flush_log_outside();  // no later call gets far enough to flush the line
}

void Context::abort(const std::string &reason) noexcept {
  try {
    failure_.set(Error(FSDP_ABORTED, format_text("rank {} aborted: {}", rank_, reason), static_cast<int32_t>(rank_)));
    if (world_) world_->abort(reason);
  } catch (...) {  // out of memory for the text, but only the flag matters
    failure_.set(Error(FSDP_ABORTED, {}));
  }
}

void Context::fail_for_good(const Error &error) noexcept {
  const bool found_here =
      error.status == FSDP_INTERRUPTED || error.status == FSDP_INTERNAL || error.status == FSDP_INVALID_STATE;
  fail_for_good(error, !found_here);
}

void Context::fail_for_good(const Error &error, bool peers_know) noexcept {
  if (failure_.set(error) && !peers_know && world_ && !closed_) world_->abort(error.message);
}

void Context::shut_down() noexcept {
  handle_destroyed_.store(true, std::memory_order_release);
  give_up_saving();
  if (failure_.failed()) record_failure();
  flight_log_.end();  // the end of the handle is not a failure
  write_trace_at_end();
  {
    const std::lock_guard lock(mutex_);
    ends_with_its_handle_ = models_.empty();
  }
  try {
    failure_.set(Error(FSDP_INVALID_HANDLE, format_text("the context of rank {} has been destroyed", rank_)));
    const auto last = last_error();
    if (world_ && !closed_)
      world_->tell_destroyed(format_text("destroyed its context without fsdp_close_context{}{}",
                                         last ? "; its last error: " : "", last ? last->message : std::string()));
  } catch (...) {
    failure_.set(Error(FSDP_INVALID_HANDLE, {}));
  }
}

void Context::remember(const Error &error) noexcept {
  try {
    std::lock_guard lock(mutex_);
    last_error_.emplace(error);
  } catch (...) {  // out of memory: the caller has only the status
  }
}

std::optional<Error> Context::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

// ---- the save that is under way ----

// Waits for the save. The save's own handle reports its error.
void Context::await_saving() {
  const auto save = checkpoint_slot_.get();
  if (!save) return;
  const auto error = capture_error([&] { save->wait("a checkpoint that was committed before"); });
  failure_.check();
  if (error && error->status == FSDP_INTERRUPTED) throw *error;
  if (error) log(FSDP_LOG_WARNING, format_text("rank {}: the checkpoint before has failed: {}", rank_, error->message));
}

// Gives the save up. Its models may hold the last references to the context.
void Context::give_up_saving() noexcept {
  const auto save = checkpoint_slot_.get();
  if (!save) return;
  if (save->under_way()) {
    log(FSDP_LOG_WARNING, "a checkpoint under way was given up with its context; fsdp_close_context waits for it");
    save->give_up(FSDP_ABORTED, "the context was destroyed");
    flush_log_outside();
  }
  checkpoint_slot_.forget(save.get());
}

CallScope::CallScope(Context &context, const char *call) : context_(context) {
  context.check_process();
  if (context.inside_.exchange(true, std::memory_order_acquire))
    fail(FSDP_BUSY, "another thread is inside the context of rank {}", context.rank_);
  if (context.look_for_failure()) {
    context.inside_.store(false, std::memory_order_release);
    context.check_handle(call);
    context.failure_.check();
  }
  context.waiter_.set_call(call);
  context.flight().enter(call);
}

CallScope::~CallScope() {
  if (context_.flight_log_.expects_words()) [[unlikely]]
    context_.flight_log_.settle();
  context_.log_queue_.flush();
  context_.inside_.store(false, std::memory_order_release);
}

}  // namespace fsdp::engine
