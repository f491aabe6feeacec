// SPDX-License-Identifier: Apache-2.0

#include "transport/nccl/connection.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/library_thread.h"
#include "base/settings.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {

namespace {

constexpr int max_blocks = 64;  // number of NCCL's channels, to which it silently limits a larger number
constexpr int largest_cluster = 8;

int read_number(const char *name, const char *value, int lowest, int highest) {
  if (!value || !*value) return undefined;
  const std::string_view text(value);
  int number = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), number);
  if (error != std::errc{} || end != text.end() || number < lowest || number > highest)
    fail(FSDP_INVALID_ARGUMENT, "{} is '{}': a whole number in [{}, {}] is needed", name, text, lowest, highest);
  return number;
}

}  // namespace

BlockLimits read_block_limits() {
  BlockLimits limits;
  limits.least = read_number("FSDP_NCCL_MIN_CTAS", setting("FSDP_NCCL_MIN_CTAS"), 1, max_blocks);
  limits.most = read_number("FSDP_NCCL_MAX_CTAS", setting("FSDP_NCCL_MAX_CTAS"), 1, max_blocks);
  limits.cluster = read_number("FSDP_NCCL_CGA_CLUSTER_SIZE", setting("FSDP_NCCL_CGA_CLUSTER_SIZE"), 0, largest_cluster);
  limits.of_switches = read_number("FSDP_NCCL_NVLS_CTAS", setting("FSDP_NCCL_NVLS_CTAS"), 1, max_blocks);
  if (limits.most != undefined && limits.least > limits.most)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_NCCL_MIN_CTAS is {} and FSDP_NCCL_MAX_CTAS {}, which is less", limits.least,
         limits.most);
  return limits;
}

void check_block_limits(const BlockLimits &limits, const Library &library) {
  if (limits.of_switches == undefined || library.since(Library::blocks_of_switches)) return;
  fail(FSDP_UNSUPPORTED, "FSDP_NCCL_NVLS_CTAS is {}, which needs NCCL {} or later: {} is {}", limits.of_switches,
       version_text(Library::blocks_of_switches), library.path, version_text(library.version));
}

std::string text_of(const BlockLimits &limits) {
  std::string text;
  const auto add = [&](const char *name, int limit) {
    if (limit != undefined) text += format_text("{}{}={}", text.empty() ? "" : ", ", name, limit);
  };
  add("FSDP_NCCL_MIN_CTAS", limits.least);
  add("FSDP_NCCL_MAX_CTAS", limits.most);
  add("FSDP_NCCL_CGA_CLUSTER_SIZE", limits.cluster);
  add("FSDP_NCCL_NVLS_CTAS", limits.of_switches);
  return text;
}

// NCCL compares the two limits before it fills in undefined values, so a lower limit alone would count as too large.
void apply(const BlockLimits &limits, Config &config) {
  config.min_ctas = limits.least;
  config.max_ctas = limits.least != undefined && limits.most == undefined ? max_blocks : limits.most;
  config.cga_cluster_size = limits.cluster;
  config.nvls_ctas = limits.of_switches;
}

std::shared_ptr<Aside> Aside::start(std::shared_ptr<Handle> handle, int32_t gpu, Body body) {
  std::shared_ptr<Aside> call(new Aside(std::move(handle), gpu, std::move(body)));
  auto argument = std::make_unique<std::shared_ptr<Aside>>(call);
  // The thread runs NCCL's code, so it has the system's default stack.
  pthread_detach(LibraryThread{"fsdp-nccl-call", "a call of NCCL's", 0}.start(work, argument.get()));
  (void)argument.release();
  return call;
}

void *Aside::work(void *argument) {
  const std::unique_ptr<std::shared_ptr<Aside>> owner(static_cast<std::shared_ptr<Aside> *>(argument));
  const std::shared_ptr<Aside> call = *owner;
  allow_calls_during_captures();
  call->run();
  call->done_.store(true, std::memory_order_release);
  return nullptr;
}

void Aside::run() {
  make_current(gpu_);
  const auto lock = handle_->enter();
  Comm *comm = handle_->comm();
  if (!comm) return;
  called_ = true;
  result_ = body_(*handle_, comm);
}

namespace {

// A launch over existing connections takes a few microseconds. The first launch of a kind makes the connections,
// together with the peers.
void pause(Clock::duration waited) {
  using namespace std::chrono_literals;
  if (waited < 200us)
    ::sched_yield();
  else
    std::this_thread::sleep_for(waited < 10ms ? 50us : 1000us);
}

// Makes sure that ncclGroupEnd is called, even after an exception.
class NcclGroup {
 public:
  NcclGroup(const Connection &connection, const std::string &what, Comm *comm)
      : connection_(connection), what_(what), comm_(comm) {
    connection.check(connection.library().ncclGroupStart(), "ncclGroupStart", what, comm);
  }
  ~NcclGroup() {
    if (open_) (void)connection_.library().ncclGroupEnd();
  }
  Result end() {
    open_ = false;
    const Result result = connection_.library().ncclGroupEnd();
    connection_.check(result, "ncclGroupEnd", what_, comm_);
    return result;
  }

 private:
  const Connection &connection_;
  const std::string &what_;
  Comm *comm_;
  bool open_ = true;
};

}  // namespace

Connection::Connection(std::shared_ptr<const Library> library, ConnectionPlan plan, const device::Device &device,
                       const Waiter &waiter)
    : library_(std::move(library)),
      plan_(std::move(plan)),
      device_(device),
      waiter_(waiter),
      handle_(std::make_shared<Handle>(library_, plan_.name, plan_.splits)),
      memory_(std::make_shared<std::vector<std::unique_ptr<Registered>>>()) {
  handle_->keep(memory_);
}

Connection::~Connection() { Handle::abort(handle_); }

void Connection::fail_ended(const std::string &what) const {
  waiter_.failure().check();
  fail(FSDP_INVALID_STATE, "{}: rank {}'s NCCL communicator '{}' has ended", what, plan_.world_rank, plan_.name);
}

void Connection::check(Result result, const char *function, const std::string &what, Comm *comm) const {
  if (result != success && result != in_progress)
    throw error_of(*library_, comm, result, {function, what, plan_.world_rank});
}

// `function` is the function in progress, which errors blame.
Result Connection::state_of(Comm *comm, const char *function, const std::string &what) const {
  Result state = success;
  const Result result = library_->ncclCommGetAsyncError(comm, &state);
  check(state, function, what, comm);
  check(result, "ncclCommGetAsyncError", what, comm);
  return state;
}

template <class Step>
void Connection::poll_until(Step &&step, const char *function, const std::string &what, uint32_t timeout_ms,
                            const std::function<void()> &look) const {
  const auto start = Clock::now();
  while (!step()) {
    const auto waited = Clock::now() - start;
    look();
    if (waited > std::chrono::milliseconds(timeout_ms))
      throw Error(FSDP_TIMEOUT,
                  format_text("{}: rank {}: {} of NCCL {} was still in progress after {} ms", what, plan_.world_rank,
                              function, version_text(library_->version), timeout_ms),
                  -1, FSDP_ORIGIN_NCCL, in_progress);
    pause(waited);
  }
}

void Connection::settle(const char *function, const std::string &what, uint32_t timeout_ms,
                        const std::function<void()> &look) {
  const auto done = [&] {
    Result state = success;
    call_parent(function, what, [&](Comm *comm) { return state = state_of(comm, function, what); });
    return state == success;
  };
  poll_until(done, function, what, timeout_ms, look);
}

void Connection::perform(const char *function, const std::string &what, uint32_t timeout_ms,
                         const std::function<void()> &look, const Aside::Body &body) {
  if (!plan_.splits) {
    call(function, what, [&](Comm *comm) { return body(*handle_, comm); });
    return settle(function, what, timeout_ms, look);
  }
  aside_ = Aside::start(handle_, device_.index(), body);
  poll_until([&] { return aside_->done(); }, function, what, timeout_ms, look);
  if (!aside_->called()) fail_ended(what);
  check(aside_->result(), function, what, nullptr);
}

Config Connection::config(bool blocking) const {
  Config config;
  config.version = static_cast<unsigned>(std::min(library_->version, Config::latest));
  config.blocking = blocking;
  if (plan_.splits && !blocking) config.split_share = 1;
  config.comm_name = handle_->name();
  apply(plan_.blocks, config);
  if (plan_.copy_engines && library_->since(Library::copy_engines)) config.cta_policy = cta_policy_zero;
  if (plan_.order_implicit && library_->since(Library::launch_order_in_config)) config.launch_order_implicit = 1;
  return config;
}

// While the communicator is being made, only an abort can reach it.
void Connection::make(const UniqueId &id, const std::string &what, uint32_t timeout_ms) {
  constexpr auto function = "ncclCommInitRankConfig";
  Config config = this->config(false);
  device_.with_current([&] {
    const auto lock = handle_->enter_parent();
    if (handle_->ending()) fail_ended(what);  // the abort waits for nothing
    check(library_->ncclCommInitRankConfig(handle_->slot(), plan_.ranks, id, plan_.rank, &config), function, what,
          nullptr);
    handle_->start();
  });
  const auto made = [&] {
    bool done = false;
    device_.with_current([&] {
      const auto lock = handle_->enter_parent();
      Comm *comm = handle_->written();
      done = comm && !handle_->ending() && state_of(comm, function, what) == success;
    });
    return done;
  };
  poll_until(made, function, what, timeout_ms, [this] { waiter_.poll(); });
  handle_->keep_parent();
}

void Connection::split(const std::string &what, uint32_t timeout_ms) {
  constexpr auto function = "ncclCommSplit";
  Config config = this->config(true);
  call_parent(function, what, [&](Comm *parent) {
    return library_->ncclCommSplit(parent, 0, plan_.rank, handle_->child_slot(), &config);
  });
  settle(function, what, timeout_ms, [this] { waiter_.poll(); });
}

void Connection::join(const UniqueId &id, uint32_t timeout_ms) {
  const std::string what = format_text("NCCL communicator '{}' of {} ranks", plan_.name, plan_.ranks);
  make(id, what, timeout_ms);
  if (plan_.splits) split(what, timeout_ms);
  handle_->publish();
}

// If an abort ends a child's call, the call's own error tells nothing; the context knows the cause. A setting of NCCL
// may keep the child from blocking; in that case the launch is awaited like a parent's.
void Connection::launch(const std::string &what, const std::function<void(Comm *)> &enqueue) {
  constexpr auto function = "ncclGroupEnd";
  Result state = success;
  const auto launch = [&](Comm *comm) {
    NcclGroup group(*this, what, comm);
    enqueue(comm);
    return state = group.end();
  };
  const auto look = [&](Comm *comm) { return state = state_of(comm, function, what); };
  const auto launched = [&] {
    if (state == in_progress) call(function, what, look);
    return state != in_progress;
  };
  try {
    call(function, what, launch);
    poll_until(launched, function, what, waiter_.timeout_ms(), [this] { waiter_.poll(); });
  } catch (const Error &) {
    waiter_.failure().check();
    throw;
  }
}

// The child belongs to its caller until it is destroyed, unless an abort takes it first.
bool Connection::finish(uint32_t timeout_ms) noexcept {
  try {
    const std::string what = format_text("the end of NCCL communicator '{}'", plan_.name);
    const auto look = [this] { waiter_.failure().check(); };
    for (auto &registered : *memory_)
      if (!deregister(*registered)) return false;
    memory_->clear();
    if (plan_.splits)
      perform("ncclCommFinalize", what, timeout_ms, look, [library = library_.get()](Handle &handle, Comm *comm) {
        if (const Result result = library->ncclCommFinalize(comm); result != success) return result;
        Comm *child = handle.leave_child();
        return child ? library->ncclCommDestroy(child) : success;
      });
    call_parent("ncclCommFinalize", what, [&](Comm *comm) { return library_->ncclCommFinalize(comm); });
    settle("ncclCommFinalize", what, timeout_ms, look);
    bool left = false;
    call_parent("ncclCommDestroy", what, [&](Comm *) {
      Comm *parent = handle_->leave_parent();
      left = parent != nullptr;
      return left ? library_->ncclCommDestroy(parent) : success;
    });
    return left;
  } catch (const std::exception &) {
    return false;
  }
}

// The memory that an NCCL communicator knows. Without registered memory NCCL copies through its own buffers, so a
// failure of these functions need not end the job.

namespace {

constexpr uint32_t forget_ms = 1000;

}  // namespace

void Connection::call_register(Registered &added, uint64_t bytes, bool windows, uint32_t timeout_ms) {
  const std::string what = format_text("memory of NCCL communicator '{}'", plan_.name);
  const auto body = [library = library_.get(), to = &added, bytes, windows](Handle &, Comm *comm) {
    return windows ? library->ncclCommWindowRegister(comm, to->data, bytes, &to->window, window_symmetric)
                   : library->ncclCommRegister(comm, to->data, bytes, &to->handle);
  };
  perform(
      windows ? "ncclCommWindowRegister" : "ncclCommRegister", what, timeout_ms, [this] { waiter_.poll(); }, body);
}

Registration Connection::register_memory(void *data, uint64_t bytes, bool windows, uint32_t timeout_ms,
                                         std::string &why) {
  Registered &added = *memory_->emplace_back(std::make_unique<Registered>(Registered{data}));
  handle_->watch(false);
  try {
    call_register(added, bytes, windows, timeout_ms);
  } catch (const Error &error) {
    waiter_.failure().check();
    if (error.origin != FSDP_ORIGIN_NCCL) throw;
    why = error.message;
    if (is_spoilt() || (windows && !library_->since(Library::windows_fail_alone))) return Registration::spoilt;
  }
  if (added.window || added.handle) return Registration::done;
  if (why.empty()) why = "NCCL has no use for such memory here";
  return Registration::refused;
}

// Is the communicator lost? NCCL keeps errors if communicators do not block, and every later call returns them. A call
// in progress cannot be taken back either.
bool Connection::is_spoilt() noexcept {
  if (aside_ && !aside_->done()) return true;
  try {
    Result state = success;
    call("ncclCommGetAsyncError", "memory", [&](Comm *comm) { return state = state_of(comm, "memory", "memory"); });
    return state != success;
  } catch (const std::exception &) {
    return true;
  }
}

bool Connection::deregister(Registered &registered) noexcept {
  if (!registered.handle && !registered.window) return true;
  const std::string what = "memory that NCCL forgets";
  const char *function = registered.window ? "ncclCommWindowDeregister" : "ncclCommDeregister";
  const auto body = [library = library_.get(), window = registered.window, buffer = registered.handle](Handle &,
                                                                                                       Comm *comm) {
    return window ? library->ncclCommWindowDeregister(comm, window) : library->ncclCommDeregister(comm, buffer);
  };
  try {
    perform(
        function, what, forget_ms, [this] { waiter_.failure().check(); }, body);
    return true;
  } catch (const std::exception &) {
    return false;
  }
}

bool Connection::forget_memory(void *data) noexcept {
  bool forgotten = true;
  std::erase_if(*memory_, [&](const auto &registered) {
    if (registered->data != data) return false;
    forgotten = deregister(*registered) && forgotten;
    return true;
  });
  return forgotten;
}

}  // namespace fsdp::transport::nccl
