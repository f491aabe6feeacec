// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/connection.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace fsdp::transport::nccl {
namespace {

// A launch that has its connections takes a few microseconds; the first one of a kind makes them, with its peers.
void pause(Clock::duration waited) {
  using namespace std::chrono_literals;
  if (waited < 200us)
    ::sched_yield();
  else
    std::this_thread::sleep_for(waited < 10ms ? 50us : 1000us);
}

// ncclGroupEnd must follow, whatever happens in between.
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

// function: what is in progress, and gets the blame.
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

// Nobody but an abort knows of it before it is made.
void Connection::make(const UniqueId &id, const std::string &what, uint32_t timeout_ms) {
  constexpr auto function = "ncclCommInitRankConfig";
  Config config = this->config(false);
  device_.with_current([&] {
    const auto lock = handle_->enter_parent();
    if (handle_->ending()) fail_ended(what);  // whoever aborted it waits for nothing
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

// A child's call that an abort has ended fails with an error that says nothing: the context knows the cause. Where it
// turns out not to block, as a setting of NCCL's may have it, it is waited for as one that does not.
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

// The child is its caller's until it is destroyed, and an abort's if one has come before.
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

}  // namespace fsdp::transport::nccl
