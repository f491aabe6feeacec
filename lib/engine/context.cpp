// SPDX-License-Identifier: Apache-2.0
#include "engine/context.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <functional>

#include "base/machine_code.h"
#include "engine/environment.h"
#include "engine/saving.h"
#include "membership/join/kernel.h"
#include "membership/wire/secret.h"
#include "trace/chrome_trace.h"
#include "trace/file.h"
#include "trace/span.h"
#include "transport/net.h"

namespace fsdp::engine {
namespace {

constexpr uint32_t default_timeout_ms = 300'000;
constexpr uint32_t default_heartbeat_timeout_ms = 8000;
constexpr uint32_t least_heartbeat_timeout_ms = 1000;  // four heartbeats
constexpr size_t most_log_lines = 1024;

device::Options device_options(const fsdp_context_options &options, uint32_t rank) {
  device::Options device;
  device.overlap = !(options.flags & FSDP_CONTEXT_NO_OVERLAP);
  device.delay_us = options.debug_delay_us;
  device.delay_seed = options.debug_delay_seed * 1'000'003 + rank;
  device.failed_allocation = options.debug_failed_allocation;
  return device;
}

// The device of a context that only plans does nothing.
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

// Empty: nowhere.
std::string find_flight_directory(const fsdp_context_options &options) {
  const char *directory = options.flight_directory ? options.flight_directory : std::getenv("FSDP_FLIGHT_DIRECTORY");
  return directory ? directory : "";
}

// A context that only plans has nothing to trace.
std::string find_trace_directory(const fsdp_context_options &options, bool plans) {
  return options.trace_directory && !plans ? options.trace_directory : "";
}

// Only views of host memory fault, and only in debug mode.
std::string find_views_directory(const fsdp_context_options &options, bool plans) {
  const bool faults = options.flags & FSDP_CONTEXT_DEBUG && device::traits_of(options.device).host_memory && !plans;
  return faults ? debug_views_directory() : "";
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
      log_level_(options.log_level ? options.log_level : FSDP_LOG_WARNING),
      rank_(rank),
      world_size_(world_size),
      waiter_(failure_, options.interrupted, options.interrupted_data,
              options.timeout_ms ? options.timeout_ms : default_timeout_ms, options.interrupted_flag),
      flight_(options.flight_events ? options.flight_events : trace::FlightRecorder::default_capacity),
      flight_directory_(find_flight_directory(options)),
      trace_directory_(find_trace_directory(options, plans)),
      views_directory_(find_views_directory(options, plans)),
      device_(create_device(options, rank, plans, waiter_, failure_, [this](const std::string &text) {
        log(FSDP_LOG_WARNING, format_text("rank {}: {}", rank_, text));
      })) {
  heartbeat_timeout_ms(options_);  // also where nobody beats: a plan finds the errors of its run
  if (options_.log == log_to_standard_error) options_.log_data = &rank_;
  options_.rendezvous = options_.flight_directory = options_.trace_directory =
      nullptr;  // the caller's strings need not outlive the call
}

// Teams and the world refer to the device and the failure: they go first. The device may have something to say; later
// than in the call that destroys the context, the program may have no log any more.
Context::~Context() {
  value_teams_.clear();
  world_.reset();
  device_.reset();
  if (ends_with_its_handle_) flush_log();
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
  context->start_trace();
  context->check_directories();
  // At once: whom rank 0 refuses, the others may wait for until the timeout.
  world.log = [&](fsdp_log_level level, const std::string &text) {
    context->log(level, format_text("rank {}: {}", world.rank, text));
    context->flush_log();
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
    context.start_trace();
    context.check_directories();
    context.world_ = transport::create_local_world(job, rank, context.waiter_, context.failure_, *context.device_);
    context.log_device();
  }
  return contexts;
}

std::shared_ptr<Context> Context::create_planning(uint32_t world_size, uint32_t rank,
                                                  const fsdp_context_options &options) {
  fsdp_context_options own = options;
  own.flight_events = 2;  // nothing happens that could be recorded
  own.flight_directory = "";
  return std::shared_ptr<Context>(new Context(own, rank, world_size, true));
}

void Context::log_device() {
  if (device_->index() >= 0) log(FSDP_LOG_INFO, format_text("rank {}: {}", rank_, device_->description()));
}

void Context::start_trace() {
  if (!(options_.flags & FSDP_CONTEXT_TRACE) && trace_directory_.empty()) return;
  timeline_ = std::make_unique<trace::Timeline>(options_.trace_events ? options_.trace_events
                                                                      : trace::Timeline::default_capacity);
  caller_spans_ = std::make_unique<trace::CallerSpans>(*timeline_);
}

void Context::write_trace(const std::string &path) const {
  require_world("fsdp_write_trace");
  if (!timeline_)
    fail(FSDP_INVALID_STATE,
         "fsdp_write_trace: the context of rank {} keeps no trace; create it with FSDP_CONTEXT_TRACE or a "
         "trace_directory",
         rank_);
  settle();
  trace::replace_file(path, trace::format_chrome_trace(timeline_->read(), rank_, world_size_), "fsdp_write_trace");
}

void Context::require_world(const char *call) const {
  if (planning())
    fail(FSDP_INVALID_STATE, "{}: this context only plans (fsdp_create_plan_context); it has no data", call);
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
  // First: it may be all that keeps a model.
  const auto unsaved = capture_error([&] {
    if (const auto saving = this->saving()) saving->wait("fsdp_close_context");
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
  transport::Team &all = *value_team(world_ranks()).team;
  wait_for_ranks("fsdp_close_context", [&] { all.barrier("fsdp_close_context"); });
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

void Context::add_unsettled(Unsettled *work) {
  const std::lock_guard lock(unsettled_mutex_);
  unsettled_.push_back(work);
}

void Context::remove_unsettled(Unsettled *work) noexcept {
  const std::lock_guard lock(unsettled_mutex_);
  std::erase(unsettled_, work);
}

void Context::settle() const noexcept {
  const std::lock_guard lock(unsettled_mutex_);
  for (Unsettled *work : unsettled_) work->settle();
}

void Context::log(fsdp_log_level level, const std::string &message) noexcept {
  if (!logs(level)) return;
  try {
    std::lock_guard lock(mutex_);
    if (log_lines_.size() < most_log_lines) log_lines_.emplace_back(level, message);
    has_log_lines_.store(true, std::memory_order_release);
  } catch (...) {  // a lost line is better than a failed step
  }
}

void Context::flush_log() noexcept {
  if (!has_log_lines_.load(std::memory_order_acquire)) return;
  std::vector<std::pair<fsdp_log_level, std::string>> lines;
  {
    std::lock_guard lock(mutex_);
    lines.swap(log_lines_);
    has_log_lines_.store(false, std::memory_order_release);
  }
  for (const auto &[level, message] : lines) options_.log(options_.log_data, level, message.c_str());
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
  context.flight_.enter(call);
}

CallScope::~CallScope() {
  if (context_.expected_words_.load(std::memory_order_relaxed)) [[unlikely]]
    context_.settle();
  context_.flush_log();
  context_.inside_.store(false, std::memory_order_release);
}

}  // namespace fsdp::engine
