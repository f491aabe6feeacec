// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/seat.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "transport/exchange.h"

namespace fsdp::transport::nccl {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t drain_ms = 1000, finish_ms = 2000;
// An abort whose communicator a graph holds goes on when that is destroyed. What waits on the GPU is free before.
constexpr std::chrono::milliseconds abort_patience = 10s, captured_patience = 1s;

}  // namespace

Seat::Seat(std::shared_ptr<Team> host, device::Device &device, std::shared_ptr<const Library> library,
           Features features, const Waiter &waiter, Failure &failure)
    : host_(std::move(host)),
      device_(device),
      library_(std::move(library)),
      features_(features),
      waiter_(waiter),
      failure_(failure),
      order_(features.order_implicit ? nullptr : LaunchOrder::of(device)),
      windows_(features.windows),
      guard_(host_, failure, "NCCL") {}

// The first rank's, or what went wrong there.
UniqueId Seat::share_id(const std::string &what) {
  UniqueId id{};
  attempt_together(*host_, what, [&] {
    if (rank() != 0) return;
    Result result = success;
    device_.with_current([&] { result = library_->ncclGetUniqueId(&id); });
    if (result != success) throw error_of(*library_, nullptr, result, {"ncclGetUniqueId", what, host_->world_rank(0)});
  });
  std::vector<UniqueId> ids(size());
  host_->all_gather(&id, sizeof id, ids.data(), what.c_str());
  return ids.front();
}

ConnectionPlan Seat::plan(const std::string &name, bool copy_engines) const {
  return {name,         static_cast<int>(size()), static_cast<int>(rank()), host_->world_rank(rank()),
          copy_engines, features_.order_implicit, features_.splits,         features_.blocks};
}

// Sooner than the others' wait for this rank's word ends.
void Seat::join(Connection &connection, const UniqueId &id) {
  connection.join(id, waiter_.timeout_ms() - waiter_.timeout_ms() / 4);
}

std::shared_ptr<Launches> Seat::open(const std::string &name, bool gathers) {
  const std::string what = format_text("NCCL communicator '{}'", name);
  const UniqueId id = share_id(what);
  std::shared_ptr<Launches> launches;
  try {
    attempt_together(*host_, what, [&] {
      auto connection =
          std::make_unique<Connection>(library_, plan(name, gathers && features_.copy_engines), device_, waiter_);
      launches = std::make_shared<Launches>(std::move(connection), device_, order_, launched_, waiter_, failure_);
      guard_.add(launches);
      join(launches->connection(), id);
    });
    register_all(*launches);
    open_.push_back(launches);
  } catch (...) {
    if (launches) {
      (void)end(*launches);
      guard_.remove(launches);
    }
    throw;
  }
  return launches;
}

bool Seat::end(Launches &launches) noexcept {
  const Connection &connection = launches.connection();
  Handle::abort(connection.handle());
  return connection.handle()->await_end(connection.captured() ? captured_patience : abort_patience);
}

void Seat::close(const std::shared_ptr<Launches> &launches) noexcept {
  std::erase(open_, launches);
  const bool drained = launches->drain(drain_ms);
  if (!drained && !failure_.failed())
    failure_.set(
        Error(FSDP_INVALID_STATE, format_text("an NCCL communicator of rank {} was destroyed with work in flight: {}",
                                              host_->world_rank(rank()), launches->history().last)));
  const bool ended = (drained && launches->connection().finish(finish_ms)) || end(*launches);
  guard_.remove(launches);
  if (!ended && launches->connection().captured())
    tell(FSDP_LOG_WARNING,
         "NCCL communicator '{}' of rank {} cannot end: graphs that captured its work still exist; destroy them "
         "(cudaGraphExecDestroy, cudaGraphDestroy) before the model. NCCL keeps its memory until then",
         launches->connection().plan().name, host_->world_rank(rank()));
}

// Without registered memory everything works, through NCCL's own buffers.
void Seat::register_all(Launches &launches) {
  for (const KnownMemory &memory : memory_)
    if (!register_memory(launches.connection(), memory)) return start_over(launches);
}

bool Seat::can_register(bool windows) const noexcept {
  return windows ? library_->ncclCommWindowRegister != nullptr : library_->ncclCommRegister != nullptr;
}

// What is worst of all ranks.
Registration Seat::register_everywhere(Connection &connection, const KnownMemory &memory, std::string &why) {
  Registration mine;
  try {
    // Ranks that wait in vain for one that has failed must come to the exchange in time.
    mine = connection.register_memory(memory.data, memory.bytes, windows_, waiter_.timeout_ms() / 4, why);
  } catch (const Error &error) {
    failure_.set(error);
    throw;
  }
  std::vector<Registration> all(size());
  host_->all_gather(&mine, sizeof mine, all.data(), "memory registered with NCCL");
  const Registration worst = *std::max_element(all.begin(), all.end());
  if (worst != Registration::spoilt) connection.handle()->watch(true);
  if (worst != Registration::done && why.empty()) why = "another rank's cannot be";
  return worst;
}

// From 2.29.7 on a window that NCCL has no use for is registered in no other way either.
bool Seat::take_buffers(const std::string &why) {
  if (!windows_ || !can_register(false)) return false;
  windows_ = false;
  tell(FSDP_LOG_INFO, "NCCL's memory is registered as buffers instead of windows: rank {}: {}",
       host_->world_rank(rank()), why);
  return true;
}

// If one rank cannot use it, none may: NCCL's ranks would choose different algorithms. False: the communicator is of no
// use any more, on any rank, and no memory is registered from now on.
bool Seat::register_memory(Connection &connection, const KnownMemory &memory) {
  if (!registers_ || !can_register(windows_)) return true;
  std::string why;
  const Registration worst = register_everywhere(connection, memory, why);
  if (worst == Registration::done) return true;
  if (worst == Registration::refused) {
    forget(connection, memory.data);
    if (take_buffers(why)) return register_memory(connection, memory);
  }
  if (!std::exchange(warned_, true))
    tell(FSDP_LOG_WARNING, "NCCL works with copies of memory that is not registered, which costs speed: rank {}: {}",
         host_->world_rank(rank()), why);
  registers_ = worst != Registration::spoilt;
  return registers_;
}

void Seat::add_memory(std::byte *data, uint64_t bytes) {
  if (!data || bytes == 0) return;
  memory_.push_back({data, bytes});
  for (const auto &launches : open_)
    if (!register_memory(launches->connection(), memory_.back())) start_over(*launches);
}

void Seat::forget(Connection &connection, void *data) noexcept {
  if (!connection.forget_memory(data) && !failure_.failed())
    tell(FSDP_LOG_WARNING, "NCCL communicator '{}' of rank {} does not forget memory that is given back",
         connection.plan().name, host_->world_rank(rank()));
}

void Seat::drop_memory(std::byte *data) noexcept {
  for (const auto &launches : open_) forget(launches->connection(), data);
  std::erase_if(memory_, [&](const KnownMemory &memory) { return memory.data == data; });
}

}  // namespace fsdp::transport::nccl
