// SPDX-License-Identifier: Apache-2.0

#include "transport/nccl/communicators.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "transport/exchange.h"

namespace fsdp::transport::nccl {

namespace {

using namespace std::chrono_literals;

constexpr uint32_t drain_ms = 1000, finish_ms = 2000;
// If a graph refers to a communicator, the communicator's abort goes on when the graph is destroyed. Kernels that wait
// on the GPU are freed before that.
constexpr std::chrono::milliseconds abort_patience = 10s, captured_patience = 1s;

}  // namespace

Communicators::Communicators(std::shared_ptr<Team> host, device::Device &device, std::shared_ptr<const Library> library,
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

// Shares the first rank's id, or its error.
UniqueId Communicators::share_id(const std::string &what) {
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

ConnectionPlan Communicators::plan(const std::string &name, bool copy_engines) const {
  return {name,         static_cast<int>(size()), static_cast<int>(rank()), host_->world_rank(rank()),
          copy_engines, features_.order_implicit, features_.splits,         features_.blocks};
}

// The timeout is shorter, so that this rank reports before the others stop waiting for its message.
void Communicators::join(Connection &connection, const UniqueId &id) {
  connection.join(id, waiter_.timeout_ms() - waiter_.timeout_ms() / 4);
}

std::shared_ptr<Launches> Communicators::open(const std::string &name, bool gathers) {
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

bool Communicators::end(Launches &launches) noexcept {
  const Connection &connection = launches.connection();
  Handle::abort(connection.handle());
  return connection.handle()->await_end(connection.captured() ? captured_patience : abort_patience);
}

void Communicators::close(const std::shared_ptr<Launches> &launches) noexcept {
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

// Without registered memory everything still works, through NCCL's own buffers.
void Communicators::register_all(Launches &launches) {
  for (const KnownMemory &memory : memory_)
    if (!register_memory(launches.connection(), memory)) return start_over(launches);
}

bool Communicators::can_register(bool windows) const noexcept {
  return windows ? library_->ncclCommWindowRegister != nullptr : library_->ncclCommRegister != nullptr;
}

// Returns the worst result of all ranks.
Registration Communicators::register_everywhere(Connection &connection, const KnownMemory &memory, std::string &why) {
  Registration mine;
  try {
    // Ranks that wait in vain for a failed rank must still come to the exchange in time.
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

// From 2.29.7 on, memory that NCCL cannot use as a window is not registered as a buffer either.
bool Communicators::take_buffers(const std::string &why) {
  if (!windows_ || !can_register(false)) return false;
  windows_ = false;
  tell(FSDP_LOG_INFO, "NCCL's memory is registered as buffers instead of windows: rank {}: {}",
       host_->world_rank(rank()), why);
  return true;
}

// If one rank cannot use the memory, no rank may, because NCCL's ranks would choose different algorithms. Returns false
// if the communicator is lost on all ranks; from then on no memory is registered.
bool Communicators::register_memory(Connection &connection, const KnownMemory &memory) {
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

void Communicators::add_memory(std::byte *data, uint64_t bytes) {
  if (!data || bytes == 0) return;
  memory_.push_back({data, bytes});
  for (const auto &launches : open_)
    if (!register_memory(launches->connection(), memory_.back())) start_over(*launches);
}

void Communicators::forget(Connection &connection, void *data) noexcept {
  if (!connection.forget_memory(data) && !failure_.failed())
    tell(FSDP_LOG_WARNING, "NCCL communicator '{}' of rank {} does not forget memory that is given back",
         connection.plan().name, host_->world_rank(rank()));
}

void Communicators::drop_memory(std::byte *data) noexcept {
  for (const auto &launches : open_) forget(launches->connection(), data);
  std::erase_if(memory_, [&](const KnownMemory &memory) { return memory.data == data; });
}

// NCCL compares nothing and takes nothing back. So the work that ranks have enqueued is compared here. Work that cannot
// end is aborted, and its communicators are made again.

namespace {

constexpr std::chrono::milliseconds longest_doubt = std::chrono::seconds(10), look_again(20);
// A communicator in a graph ends only when the graph is destroyed.
constexpr std::chrono::milliseconds graph_patience = std::chrono::seconds(10);

}  // namespace

Communicators::Rounds Communicators::exchange_rounds(bool abandoned) {
  EnqueuedRound mine;
  mine.abandoned = abandoned;
  for (const auto &launches : open_) {
    if (mine.count == EnqueuedRound::most) break;
    mine.captured |= uint64_t{launches->connection().captured()} << mine.count;
    mine.histories[mine.count++] = launches->history();
  }
  Rounds all(size());
  doubt();
  host_->all_gather(&mine, sizeof mine, all.data(), "the collectives of a round");
  captured_.clear();
  for (const EnqueuedRound &round : all) captured_.push_back(round.captured);
  return all;
}

void Communicators::doubt() noexcept {
  const std::chrono::milliseconds part(waiter_.timeout_ms() / 4);
  for (const auto &launches : open_) launches->connection().handle()->doubt(std::min(part, longest_doubt));
}

void Communicators::trust() noexcept {
  for (const auto &launches : open_) launches->connection().handle()->doubt({});
}

// Other teams may differ even if this team does not. In that case the next collective, or the end of the round, shows
// that no rank has cut this team's work.
bool Communicators::ends_alike() {
  const Rounds all = exchange_rounds(true);
  return std::all_of(all.begin(), all.end(), [&](const EnqueuedRound &round) { return same(round, all.front()); });
}

bool Communicators::same(const EnqueuedRound &a, const EnqueuedRound &b) noexcept {
  const auto equal = [](const History &x, const History &y) { return x.hash == y.hash; };
  return a.count == b.count && std::equal(a.histories, a.histories + a.count, b.histories, equal);
}

void Communicators::end_round(Launches &ended) {
  const Rounds all = exchange_rounds(ended.abandoned());
  const EnqueuedRound &mine = all[rank()];
  const bool given_up =
      std::all_of(all.begin(), all.end(), [](const EnqueuedRound &round) { return round.abandoned != 0; });
  bool agreed = true;  // if false although no rank gave up, this rank's own difference is reported below
  for (uint32_t r = 0; r < size(); ++r)
    for (size_t i = 0; i < std::min(mine.count, all[r].count); ++i) {
      if (all[r].histories[i].hash == all[0].histories[i].hash) continue;
      agreed = false;
      const uint32_t other = r == rank() ? 0 : r;
      if (!given_up && all[other].histories[i].hash != mine.histories[i].hash)
        fail_history(i, other, mine.histories[i], all[other].histories[i]);
    }
  if (agreed) {
    trust();
  } else {
    cut();
    renew();
  }
  ended.next_round();
}

void Communicators::cut() noexcept {
  for (const auto &launches : open_) Handle::abort(launches->connection().handle());
}

// Called when the communicator has been aborted on all ranks.
void Communicators::reopen(Launches &launches) {
  const ConnectionPlan before = launches.connection().plan();
  const std::string what = format_text("NCCL communicator '{}', made anew", before.name);
  const UniqueId id = share_id(what);
  attempt_together(*host_, what, [&] {
    launches.replace(std::make_unique<Connection>(library_, plan(before.name, before.copy_engines), device_, waiter_));
    join(launches.connection(), id);
  });
  register_all(launches);
}

// If ranks are threads of one process, NCCL ends all their communicators together with the last one, and waits for the
// graphs of all.
std::optional<uint32_t> Communicators::find_holder(const Launches &launches) const {
  if (launches.connection().captured()) return rank();
  const auto is_it = [&](const auto &one) { return one.get() == &launches; };
  const auto index = std::find_if(open_.begin(), open_.end(), is_it) - open_.begin();
  for (uint32_t r = 0; r < captured_.size(); ++r)
    if (captured_[r] >> index & 1) return r;
  return std::nullopt;
}

// An abort immediately frees kernels that wait on the GPU, but it also waits for work of the caller's own streams.
void Communicators::await_end(const Launches &launches, Clock::time_point start) const {
  const Connection &connection = launches.connection();
  const std::optional<uint32_t> holder = find_holder(launches);
  std::chrono::milliseconds patience(waiter_.timeout_ms() - waiter_.timeout_ms() / 4);
  if (holder) patience = std::min(patience, graph_patience);
  while (!connection.handle()->await_end(look_again)) {
    waiter_.poll();
    if (Clock::now() - start < patience) continue;
    if (holder)
      fail(FSDP_INVALID_STATE,
           "rank {}: graphs have captured work of NCCL communicator '{}' on rank {}, which is being aborted: they "
           "cannot be launched any more, and it does not end before they are destroyed",
           host_->world_rank(rank()), connection.plan().name, host_->world_rank(*holder));
    fail(FSDP_TIMEOUT, "rank {}: ncclCommAbort of NCCL communicator '{}' has not returned within {} ms",
         host_->world_rank(rank()), connection.plan().name, patience.count());
  }
}

// The wait is shorter, so that this rank reports before the others stop waiting for its message.
void Communicators::await_ends(std::span<const std::shared_ptr<Launches>> all) {
  const auto start = Clock::now();
  attempt_together(*host_, "the end of NCCL communicators", [&] {
    for (const auto &launches : all) await_end(*launches, start);
  });
}

// Needed because NCCL never clears the error of a registration.
void Communicators::start_over(Launches &launches) {
  Handle::abort(launches.connection().handle());
  const std::shared_ptr<Launches> one(std::shared_ptr<void>(), &launches);  // a pointer that owns nothing
  await_ends({&one, 1});
  reopen(launches);
}

void Communicators::renew() {
  try {
    await_ends(open_);
    for (const auto &launches : open_) reopen(*launches);
    launched_ = 0;
  } catch (const Error &error) {
    failure_.set(error);
    throw;
  }
}

// Called when the work on the GPU cannot be taken back and does not end.
void Communicators::fail_history(size_t index, uint32_t peer, const History &mine, const History &theirs) {
  const auto last = [](const History &history) {
    return std::string(history.last, ::strnlen(history.last, sizeof history.last));
  };
  const Error error(
      FSDP_MISMATCH,
      format_text(
          "ranks have enqueued different collectives, or others in between, on NCCL "
          "communicator '{}', and NCCL cannot take them back: rank {} {} of them, the last {}; rank {} {}, the last {}",
          open_[index]->connection().plan().name, host_->world_rank(rank()), mine.count, last(mine),
          host_->world_rank(peer), theirs.count, last(theirs)),
      static_cast<int32_t>(host_->world_rank(peer)));
  failure_.set(error);
  throw error;
}

}  // namespace fsdp::transport::nccl
