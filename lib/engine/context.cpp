// SPDX-License-Identifier: Apache-2.0
#include "engine/context.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <system_error>

#include "comm/net.h"
#include "engine/storage.h"
#include "trace/chrome_trace.h"
#include "trace/file.h"
#include "trace/flight_record.h"
#include "trace/span.h"

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

// A NaN of any rank stays one: "did anybody diverge" must have one answer.
double combine(fsdp_value_op op, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (op == FSDP_VALUE_SUM) return a + b;
  return op == FSDP_VALUE_MIN ? std::min(a, b) : std::max(a, b);
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
              options.timeout_ms ? options.timeout_ms : default_timeout_ms),
      flight_(options.flight_events ? options.flight_events : trace::FlightRecorder::default_capacity),
      flight_directory_(find_flight_directory(options)),
      device_(create_device(options, rank, plans, waiter_, failure_, [this](const std::string &text) {
        log(FSDP_LOG_WARNING, format_text("rank {}: {}", rank_, text));
      })) {
  options_.rendezvous = options_.flight_directory = nullptr;  // the caller's strings need not outlive the call
}

// Teams and the world refer to the device and the failure: they go first. The device may have something to say; later than
// in the call that destroys the context, the program may have no log any more.
Context::~Context() {
  world_team_.reset();
  world_.reset();
  device_.reset();
  if (ends_with_its_handle_) flush_log();
}

std::shared_ptr<Context> Context::create(const fsdp_context_options &options) {
  comm::WorldOptions world;
  if (options.world_size) {
    world.rank = options.rank;
    world.size = options.world_size;
    if (world.rank >= world.size)
      fail(FSDP_INVALID_ARGUMENT, "fsdp_context_options.rank: rank {} is outside [0, {})", world.rank, world.size);
    if (options.rendezvous) world.rendezvous = options.rendezvous;
    comm::complete_world(world);
  } else {
    world = comm::read_launcher_environment();
  }
  world.timeout_ms = options.timeout_ms ? options.timeout_ms : default_timeout_ms;
  world.heartbeat_timeout_ms = heartbeat_timeout_ms(options);
  std::shared_ptr<Context> context(new Context(options, world.rank, world.size));
  context->start_trace();
  context->check_flight_directory();
  context->world_ = comm::create_process_world(world, context->waiter_, context->failure_, *context->device_);
  context->log_device();
  context->log(FSDP_LOG_INFO, format_text("rank {} of {}: {}", world.rank, world.size, context->world_->description()));
  if (const std::string warnings = context->world_->warnings(); !warnings.empty())
    context->log(FSDP_LOG_WARNING, format_text("rank {}: {}", world.rank, warnings));
  return context;
}

std::vector<std::shared_ptr<Context>> Context::create_local(uint32_t world_size, const fsdp_context_options &options) {
  auto job = comm::create_local_job(world_size);
  std::vector<std::shared_ptr<Context>> contexts;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    contexts.emplace_back(new Context(options, rank, world_size));
    Context &context = *contexts.back();
    context.start_trace();
    context.check_flight_directory();
    context.world_ = comm::create_local_world(job, rank, context.waiter_, context.failure_, *context.device_);
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
  if (!on_host()) log(FSDP_LOG_INFO, format_text("rank {}: {}", rank_, device_->description()));
}

void Context::start_trace() {
  if (!(options_.flags & FSDP_CONTEXT_TRACE)) return;
  timeline_ = std::make_unique<trace::Timeline>(options_.trace_events ? options_.trace_events : trace::Timeline::default_capacity);
  caller_spans_ = std::make_unique<trace::CallerSpans>(*timeline_);
}

void Context::write_trace(const std::string &path) const {
  require_world("fsdp_write_trace");
  if (!timeline_)
    fail(FSDP_INVALID_STATE, "fsdp_write_trace: the context of rank {} keeps no trace; create it with FSDP_CONTEXT_TRACE", rank_);
  settle();
  trace::replace_file(path, trace::format_chrome_trace(timeline_->read(), rank_, world_size_), "fsdp_write_trace");
}

// A record that cannot be written is known now, and not after the failure.
void Context::check_flight_directory() {
  if (flight_directory_.empty() || ::access(flight_directory_.c_str(), W_OK | X_OK) == 0) return;
  log(FSDP_LOG_WARNING, format_text("rank {}: no flight record can be written into '{}': {}", rank_, flight_directory_,
                                    std::generic_category().message(errno)));
}

void Context::write_flight_record(const std::string &path) const {
  require_world("fsdp_write_flight_record");
  settle();
  trace::replace_file(path, trace::format_flight_record(flight_.read(), {rank_, world_size_, failure_.get()}),
                      "fsdp_write_flight_record");
}

void Context::record_failure() noexcept {
  if (flight_written_.exchange(true) || planning()) return;
  try {
    std::string line = format_text("rank {} of {}: the context has failed: {}", rank_, world_size_, failure_.get()->message);
    if (!flight_directory_.empty()) {
      const std::string path = format_text("{}/flight-{}.json", flight_directory_, rank_);
      try {
        trace::keep_earlier_file(path);
        write_flight_record(path);
        line += format_text("; its flight record: {}", path);
      } catch (const Error &error) {
        line += format_text("; its flight record could not be written: {}", error.message);
      }
    }
    log(FSDP_LOG_ERROR, line);
  } catch (...) {  // out of memory: the failure itself is told by the call
  }
  // No later call comes so far as to hand the line over.
  if (inside_.exchange(true, std::memory_order_acquire)) return;
  flush_log();
  inside_.store(false, std::memory_order_release);
}

void Context::require_world(const char *call) const {
  if (planning()) fail(FSDP_INVALID_STATE, "{}: this context only plans (fsdp_create_plan_context); it has no data", call);
}

void Context::require_no_other_capture(const Runtime *model, const char *call) const {
  if (const Runtime *captured = captured_; captured && captured != model)
    fail(FSDP_INVALID_STATE,
         "{}: another model of this context is being captured into a graph, which this call could spoil; make it "
         "after that model's fsdp_capture_end",
         call);
}

bool Context::run_alone(const std::function<void()> &body) {
  if (inside_.exchange(true, std::memory_order_acquire)) return false;
  const auto error = catch_error(body);
  inside_.store(false, std::memory_order_release);
  if (error) throw *error;
  return true;
}

std::unique_ptr<comm::Team> Context::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  return world_->create_team(ranks, what);
}

comm::DeviceTransport Context::transport() const noexcept {
  switch (options_.device_transport) {
    case FSDP_TRANSPORT_NCCL: return comm::DeviceTransport::nccl;
    case FSDP_TRANSPORT_STAGING: return comm::DeviceTransport::staging;
    default: return comm::DeviceTransport::automatic;
  }
}

std::shared_ptr<comm::Team> Context::create_device_team(std::shared_ptr<comm::Team> team, comm::DeviceTransport transport) {
  auto made = comm::create_device_team(std::move(team), *device_, transport, waiter_, failure_);
  for (const comm::Note &note : made->notes()) log(note.level, note.text);
  return made;
}

uint64_t Context::message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  if (world_) return world_->message_bytes(ranks, sums);
  const auto count = static_cast<uint32_t>(ranks.size());
  const std::vector<uint32_t> hosts = hosts_of(ranks);
  if (std::count(hosts.begin(), hosts.end(), hosts[0]) == count) return comm::message_staging_bytes(count);
  return sums ? comm::net_scratch_bytes(count, comm::read_net_chunk_bytes()) : 0;
}

std::vector<uint32_t> Context::hosts_of(std::span<const uint32_t> ranks) const {
  const uint32_t pretended = options_.ranks_per_host;
  std::vector<uint32_t> hosts;
  for (const uint32_t rank : ranks) {
    const uint32_t host = world_ ? world_->host_of(rank) : 0;
    if (pretended && host)
      fail(FSDP_INVALID_ARGUMENT, "fsdp_context_options.ranks_per_host is {}, but rank {} is on another host than rank 0 already",
           pretended, rank);
    hosts.push_back(pretended ? rank / pretended : host);
  }
  return hosts;
}

comm::Team &Context::world_team() {
  if (!world_team_) {
    value_messages_.resize(world_size_ + 1);
    std::vector<uint32_t> ranks(world_size_);
    std::iota(ranks.begin(), ranks.end(), 0u);
    world_team_ = create_team(ranks, "the world");
  }
  return *world_team_;
}

void Context::exchange_with_world(const void *mine, uint64_t bytes, void *all, const char *what) {
  comm::Team &team = world_team();
  const trace::Span wait(timeline(), trace::Kind::wait, "wait for peers");
  const trace::FlightScope exchange(value_flights_, what, 0);
  flight_.begin_wait("wait for peers", nullptr, trace::now_ns());
  team.exchange_fixed(mine, bytes, all, what);
  flight_.end_wait(trace::now_ns());  // of one that failed, what it was for is kept
}

// The header goes with the values, so that ranks that disagree find out before anything is added.
void Context::all_reduce(double *values, uint64_t count, fsdp_value_op op) {
  require_world("fsdp_all_reduce_values");
  if (closed_) fail(FSDP_INVALID_STATE, "fsdp_all_reduce_values: rank {} has closed this context; destroy it", rank_);
  const trace::Span call(timeline(), trace::Kind::call, "all_reduce_values", nullptr, 0, count * sizeof *values);
  world_team();  // and the messages
  ValueMessage &mine = value_messages_[world_size_];
  mine.count = count;
  mine.op = op;
  std::copy_n(values, count, mine.values);
  exchange_with_world(&mine, sizeof mine, value_messages_.data(), "fsdp_all_reduce_values");
  for (uint32_t r = 0; r < world_size_; ++r) {
    const ValueMessage &other = value_messages_[r];
    if (other.count != count || other.op != op)
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(r),
                "fsdp_all_reduce_values: rank {} reduces {} values with op {}, rank {} reduces {} with op {}", r,
                other.count, other.op, rank_, count, op);
  }
  for (uint64_t i = 0; i < count; ++i) {
    double result = value_messages_[0].values[i];
    for (uint32_t r = 1; r < world_size_; ++r) result = combine(op, result, value_messages_[r].values[i]);
    values[i] = result;
  }
}

void Context::close() {
  require_world("fsdp_close_context");
  if (closed_) fail(FSDP_INVALID_STATE, "fsdp_close_context: rank {} has closed this context before; destroy it", rank_);
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
         "fsdp_close_context: a model of rank {} is in the middle of a step ({}); end it with fsdp_finish_grads and a publish, "
         "or with fsdp_discard_step",
         rank_, unfinished);
  uint8_t here = 1;
  std::vector<uint8_t> all(world_size_);
  exchange_with_world(&here, 1, all.data(), "fsdp_close_context");
  world_->leave();
  closed_ = true;
}

void Context::add_model(const OpenModel *model) {
  std::lock_guard lock(mutex_);
  models_.push_back(model);
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

void Context::abort(const std::string &reason) noexcept {
  try {
    failure_.set(Error(FSDP_ABORTED, format_text("rank {} aborted: {}", rank_, reason), static_cast<int32_t>(rank_)));
    if (world_) world_->abort(reason);
  } catch (...) {  // out of memory for the text: the flag is what matters
    failure_.set(Error(FSDP_ABORTED, {}));
  }
}

void Context::fail_for_good(const Error &error) noexcept {
  const bool found_here = error.status == FSDP_INTERRUPTED || error.status == FSDP_INTERNAL || error.status == FSDP_INVALID_STATE;
  fail_for_good(error, !found_here);
}

void Context::fail_for_good(const Error &error, bool peers_know) noexcept {
  if (failure_.set(error) && !peers_know && world_ && !closed_) world_->abort(error.message);
}

void Context::shut_down() noexcept {
  if (failure_.failed()) record_failure();
  flight_written_ = true;  // that the handle is gone is no failure
  {
    const std::lock_guard lock(mutex_);
    ends_with_its_handle_ = models_.empty();
  }
  try {
    failure_.set(Error(FSDP_INVALID_HANDLE, format_text("the context of rank {} has been destroyed", rank_)));
    const auto last = last_error();
    if (world_ && !closed_)
      world_->abort(format_text("destroyed its context without fsdp_close_context{}{}", last ? "; its last error: " : "",
                                last ? last->message : std::string()));
  } catch (...) {
    failure_.set(Error(FSDP_INVALID_HANDLE, {}));
  }
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

void Context::remember(const Error &error) noexcept {
  try {
    std::lock_guard lock(mutex_);
    last_error_.emplace(error);
  } catch (...) {  // then the status alone must do
  }
}

std::optional<Error> Context::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

void Context::check_process() const {
  if (in_child())
    fail(FSDP_INVALID_STATE, "this process is a fork of the one that made the context of rank {}; make a new context here", rank_);
}

CallScope::CallScope(Context &context, const char *call) : context_(context) {
  context.check_process();
  if (context.inside_.exchange(true, std::memory_order_acquire))
    fail(FSDP_BUSY, "another thread is inside the context of rank {}", context.rank_);
  if (context.failure_.failed()) {
    context.inside_.store(false, std::memory_order_release);
    context.failure_.check();
  }
  context.waiter_.set_call(call);
  context.flight_.enter(call);
}

CallScope::~CallScope() {
  context_.flush_log();
  context_.inside_.store(false, std::memory_order_release);
}

}  // namespace fsdp::engine
