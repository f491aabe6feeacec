// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/connection.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <thread>

namespace fsdp::comm::nccl {
namespace {

constexpr uint32_t forget_ms = 1000;

// A launch that has its connections takes a few microseconds; the first one of a kind makes them, with its peers.
void pause(Clock::duration waited) {
  using namespace std::chrono_literals;
  if (waited < 200us)
    ::sched_yield();
  else
    std::this_thread::sleep_for(waited < 10ms ? 50us : 1000us);
}

// ncclGroupEnd must follow, whatever happens in between.
class Group {
 public:
  Group(const Connection &connection, const std::string &what, Comm *comm)
      : connection_(connection), what_(what), comm_(comm) {
    connection.check(connection.library().ncclGroupStart(), "ncclGroupStart", what, comm);
  }
  ~Group() {
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
    : library_(std::move(library)), plan_(std::move(plan)), device_(device), waiter_(waiter) {}

Connection::~Connection() = default;

Comm *Connection::alive(const std::string &what) const {
  if (comm_) return comm_;
  waiter_.failure().check();
  fail(FSDP_INVALID_STATE, "{}: rank {}'s NCCL communicator '{}' has ended", what, plan_.world_rank, plan_.name);
}

void Connection::check(Result result, const char *function, const std::string &what, Comm *comm) const {
  if (result != success && result != in_progress)
    throw error_of(*library_, comm, result, {function, what, plan_.world_rank});
}

template <class Function>
void Connection::call(const char *function, const std::string &what, Function &&body) {
  const auto locked = [&] {
    const std::lock_guard lock(mutex_);
    Comm *comm = alive(what);
    check(body(comm), function, what, comm);
  };
  device_.with_current(std::ref(locked));
}

void Connection::settle(const char *function, const std::string &what, uint32_t timeout_ms,
                        const std::function<void()> &look) {
  const auto start = Clock::now();
  for (;;) {
    Result state = success;
    call("ncclCommGetAsyncError", what, [&](Comm *comm) {
      const Result result = library_->ncclCommGetAsyncError(comm, &state);
      check(state, function, what, comm);
      return result;
    });
    if (state == success) return;
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

Config Connection::config() const {
  Config config;
  config.version = static_cast<unsigned>(std::min(library_->version, Config::latest));
  config.blocking = 0;
  config.comm_name = plan_.name.c_str();
  if (plan_.copy_engines && library_->since(Library::copy_engines)) config.cta_policy = cta_policy_zero;
  if (plan_.order_implicit && library_->since(Library::launch_order_in_config)) config.launch_order_implicit = 1;
  return config;
}

void Connection::join(const UniqueId &id, uint32_t timeout_ms) {
  const std::string what = format_text("NCCL communicator '{}' of {} ranks", plan_.name, plan_.ranks);
  constexpr auto function = "ncclCommInitRankConfig";
  Config config = this->config();
  device_.with_current([&] {
    const std::lock_guard lock(mutex_);
    check(library_->ncclCommInitRankConfig(&comm_, plan_.ranks, id, plan_.rank, &config), function, what, nullptr);
  });
  settle(function, what, timeout_ms, [this] { waiter_.poll(); });
}

void Connection::launch(const std::string &what, const std::function<void(Comm *)> &enqueue) {
  call("ncclGroupEnd", what, [&](Comm *comm) {
    Group group(*this, what, comm);
    enqueue(comm);
    group.end();
    return success;
  });
  settle("ncclGroupEnd", what, waiter_.timeout_ms(), [this] { waiter_.poll(); });
}

bool Connection::register_memory(void *data, uint64_t bytes, bool windows) {
  const std::string what = format_text("memory of NCCL communicator '{}'", plan_.name);
  Registered &added = *memory_.emplace_back(std::make_unique<Registered>(Registered{data}));
  const char *function = windows ? "ncclCommWindowRegister" : "ncclCommRegister";
  call(function, what, [&](Comm *comm) {
    return windows ? library_->ncclCommWindowRegister(comm, data, bytes, &added.window, window_symmetric)
                   : library_->ncclCommRegister(comm, data, bytes, &added.handle);
  });
  settle(function, what, waiter_.timeout_ms(), [this] { waiter_.poll(); });
  return windows ? added.window != nullptr : added.handle != nullptr;
}

// The last step of a memory's life: what does not work out is left to the end of the communicator.
void Connection::deregister(Registered &registered) noexcept {
  const std::string what = "memory that NCCL forgets";
  try {
    call("ncclCommWindowDeregister", what, [&](Comm *comm) {
      if (registered.handle) (void)library_->ncclCommDeregister(comm, registered.handle);
      return registered.window ? library_->ncclCommWindowDeregister(comm, registered.window) : success;
    });
    settle("ncclCommWindowDeregister", what, forget_ms, [this] { waiter_.failure().check(); });
  } catch (const std::exception &) {
  }
}

void Connection::forget_memory(void *data) noexcept {
  std::erase_if(memory_, [&](const auto &registered) {
    if (registered->data != data) return false;
    deregister(*registered);
    return true;
  });
}

Operation Connection::scaled_sum(float factor) {
  for (const ScaledSum &made : sums_)
    if (std::bit_cast<uint32_t>(made.factor) == std::bit_cast<uint32_t>(factor)) return made.operation;
  auto half = static_cast<_Float16>(factor);
  Operation operation = sum;
  call("ncclRedOpCreatePreMulSum", "a sum of scaled float16 values",
       [&](Comm *comm) { return library_->ncclRedOpCreatePreMulSum(&operation, &half, float16, scalar_host, comm); });
  sums_.push_back({factor, operation});
  return operation;
}

bool Connection::finish(uint32_t timeout_ms) noexcept {
  try {
    const std::string what = format_text("the end of NCCL communicator '{}'", plan_.name);
    for (auto &registered : memory_) deregister(*registered);
    memory_.clear();
    for (const ScaledSum &made : sums_)
      call("ncclRedOpDestroy", what, [&](Comm *comm) { return library_->ncclRedOpDestroy(made.operation, comm); });
    call("ncclCommFinalize", what, [&](Comm *comm) { return library_->ncclCommFinalize(comm); });
    settle("ncclCommFinalize", what, timeout_ms, [this] { waiter_.failure().check(); });
    call("ncclCommDestroy", what, [&](Comm *comm) {
      comm_ = nullptr;
      ended_ = true;
      return library_->ncclCommDestroy(comm);
    });
    return true;
  } catch (const std::exception &) {
    return false;
  }
}

std::optional<Error> Connection::look() noexcept {
  const std::lock_guard lock(mutex_);
  if (!comm_) return std::nullopt;
  Result state = success;
  const Result result = library_->ncclCommGetAsyncError(comm_, &state);
  const Result found = result != success ? result : state;
  if (found == success || found == in_progress) return std::nullopt;
  return error_of(*library_, comm_, found,
                  {"ncclCommGetAsyncError", "NCCL communicator '" + plan_.name + "'", plan_.world_rank});
}

void Connection::abort() noexcept {
  Comm *comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::swap(comm, comm_);
  }
  if (comm) (void)library_->ncclCommAbort(comm);
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

bool Connection::ended() const noexcept {
  const std::lock_guard lock(mutex_);
  return ended_;
}

}  // namespace fsdp::comm::nccl
