// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/connection.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace fsdp::comm::nccl {
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
  void end() {
    open_ = false;
    connection_.check(connection_.library().ncclGroupEnd(), "ncclGroupEnd", what_, comm_);
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
      handle_(std::make_shared<Handle>(library_, plan_.name)),
      memory_(std::make_shared<std::vector<std::unique_ptr<Registered>>>()) {
  handle_->keep(memory_);
}

Connection::~Connection() { Handle::abort(handle_); }

Comm *Connection::alive(const std::string &what) const {
  if (Comm *comm = handle_->comm()) return comm;
  fail_ended(what);
}

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
    call(function, what, [&](Comm *comm) { return state = state_of(comm, function, what); });
    return state == success;
  };
  poll_until(done, function, what, timeout_ms, look);
}

Config Connection::config() const {
  Config config;
  config.version = static_cast<unsigned>(std::min(library_->version, Config::latest));
  config.blocking = 0;
  config.comm_name = handle_->name();
  apply(plan_.blocks, config);
  if (plan_.copy_engines && library_->since(Library::copy_engines)) config.cta_policy = cta_policy_zero;
  if (plan_.order_implicit && library_->since(Library::launch_order_in_config)) config.launch_order_implicit = 1;
  return config;
}

// Nobody but an abort knows of it before it is made.
void Connection::join(const UniqueId &id, uint32_t timeout_ms) {
  const std::string what = format_text("NCCL communicator '{}' of {} ranks", plan_.name, plan_.ranks);
  constexpr auto function = "ncclCommInitRankConfig";
  Config config = this->config();
  device_.with_current([&] {
    const auto lock = handle_->enter();
    if (handle_->ending()) fail_ended(what);  // whoever aborted it waits for nothing
    check(library_->ncclCommInitRankConfig(handle_->slot(), plan_.ranks, id, plan_.rank, &config), function, what,
          nullptr);
    handle_->start();
  });
  const auto made = [&] {
    bool done = false;
    device_.with_current([&] {
      const auto lock = handle_->enter();
      Comm *comm = handle_->written();
      done = comm && !handle_->ending() && state_of(comm, function, what) == success;
    });
    return done;
  };
  poll_until(made, function, what, timeout_ms, [this] { waiter_.poll(); });
  handle_->publish();
}

void Connection::launch(const std::string &what, const std::function<void(Comm *)> &enqueue) {
  call("ncclGroupEnd", what, [&](Comm *comm) {
    NcclGroup group(*this, what, comm);
    enqueue(comm);
    group.end();
    return success;
  });
  settle("ncclGroupEnd", what, waiter_.timeout_ms(), [this] { waiter_.poll(); });
}

bool Connection::finish(uint32_t timeout_ms) noexcept {
  try {
    const std::string what = format_text("the end of NCCL communicator '{}'", plan_.name);
    for (auto &registered : *memory_)
      if (!deregister(*registered)) return false;
    memory_->clear();
    call("ncclCommFinalize", what, [&](Comm *comm) { return library_->ncclCommFinalize(comm); });
    settle("ncclCommFinalize", what, timeout_ms, [this] { waiter_.failure().check(); });
    call("ncclCommDestroy", what, [&](Comm *) { return library_->ncclCommDestroy(handle_->leave()); });
    return true;
  } catch (const std::exception &) {
    return false;
  }
}

}  // namespace fsdp::comm::nccl
