// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/seat.h"

#include <algorithm>
#include <cstring>

#include "comm/together.h"

namespace fsdp::comm::nccl {
namespace {

constexpr uint32_t drain_ms = 1000, finish_ms = 2000;

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
  host_->exchange_fixed(&id, sizeof id, ids.data(), what.c_str());
  return ids.front();
}

ConnectionPlan Seat::plan(const std::string &name, bool copy_engines) const {
  return {name,         static_cast<int>(size()), static_cast<int>(rank()), host_->world_rank(rank()),
          copy_engines, features_.order_implicit};
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
      launches = std::make_shared<Launches>(std::move(connection), device_, order_, waiter_, failure_);
      guard_.add(launches);
      join(launches->connection(), id);
    });
  } catch (...) {
    if (launches) guard_.remove(launches, true);
    throw;
  }
  for (const Memory &memory : memory_) register_memory(launches->connection(), memory);
  open_.push_back(launches);
  return launches;
}

// The guard knows it again only when it is whole: until then its own wait is bounded.
void Seat::reopen(Launches &launches) {
  const ConnectionPlan before = launches.connection().plan();
  const std::string what = format_text("NCCL communicator '{}', made anew", before.name);
  const UniqueId id = share_id(what);
  attempt_together(*host_, what, [&] {
    launches.replace(std::make_unique<Connection>(library_, plan(before.name, before.copy_engines), device_, waiter_));
    join(launches.connection(), id);
  });
  for (const Memory &memory : memory_) register_memory(launches.connection(), memory);
}

void Seat::close(const std::shared_ptr<Launches> &launches) noexcept {
  std::erase(open_, launches);
  const bool drained = launches->drain(drain_ms);
  if (!drained && !failure_.failed())
    failure_.set(
        Error(FSDP_INVALID_STATE, format_text("an NCCL communicator of rank {} was destroyed with work in flight: {}",
                                              host_->world_rank(rank()), launches->history().last)));
  const bool ended = drained && launches->connection().finish(finish_ms);
  guard_.remove(launches, !ended);
}

// If one rank cannot use it, none may: NCCL's ranks would choose different algorithms.
void Seat::register_memory(Connection &connection, const Memory &memory) {
  const bool possible =
      features_.windows ? library_->ncclCommWindowRegister != nullptr : library_->ncclCommRegister != nullptr;
  if (!possible) return;
  uint8_t mine = 0;
  try {
    mine = connection.register_memory(memory.data, memory.bytes, features_.windows);
  } catch (const Error &error) {
    if (error.status != FSDP_INTERNAL) {  // it is not the memory
      failure_.set(error);
      throw;
    }
  }
  std::vector<uint8_t> all(size());
  host_->exchange_fixed(&mine, sizeof mine, all.data(), "memory registered with NCCL");
  if (std::find(all.begin(), all.end(), 0) != all.end()) connection.forget_memory(memory.data);
}

void Seat::add_memory(std::byte *data, uint64_t bytes) {
  if (!data || bytes == 0) return;
  memory_.push_back({data, bytes});
  for (const auto &launches : open_) register_memory(launches->connection(), memory_.back());
}

void Seat::drop_memory(std::byte *data) noexcept {
  for (const auto &launches : open_) launches->connection().forget_memory(data);
  std::erase_if(memory_, [&](const Memory &memory) { return memory.data == data; });
}

void Seat::end_round(Launches &ended) {
  constexpr size_t most = 8;
  struct Record {
    uint64_t count = 0;
    uint64_t abandoned = 0;
    History histories[most];
  };
  Record mine;
  mine.abandoned = ended.abandoned();
  for (const auto &launches : open_)
    if (mine.count < most) mine.histories[mine.count++] = launches->history();
  std::vector<Record> all(size());
  host_->exchange_fixed(&mine, sizeof mine, all.data(), "the collectives of a round");
  const bool given_up = std::all_of(all.begin(), all.end(), [](const Record &record) { return record.abandoned != 0; });
  bool same = true;  // if not and nobody gave up, one's own difference comes up below
  for (uint32_t r = 0; r < size(); ++r)
    for (size_t i = 0; i < std::min(mine.count, all[r].count); ++i) {
      if (all[r].histories[i].hash == all[0].histories[i].hash) continue;
      same = false;
      const uint32_t other = r == rank() ? 0 : r;
      if (!given_up && all[other].histories[i].hash != mine.histories[i].hash)
        fail_history(i, other, mine.histories[i], all[other].histories[i]);
    }
  if (!same) make_anew();
  ended.next_round();
}

// First all are aborted, here and on the peers: a kernel of one may stand before that of another on the GPU.
void Seat::make_anew() {
  std::optional<Error> problem;
  try {
    for (const auto &launches : open_) guard_.remove(launches, true);
    for (const auto &launches : open_) reopen(*launches);
  } catch (const Error &error) {
    problem = error;
    failure_.set(error);
  }
  for (const auto &launches : open_) guard_.add(launches);  // it aborts what there is, if the context has failed
  if (problem) throw *problem;
}

// What was enqueued on the GPU cannot be taken back, and does not end.
void Seat::fail_history(size_t index, uint32_t peer, const History &mine, const History &theirs) {
  const auto last = [](const History &history) {
    return std::string(history.last, ::strnlen(history.last, sizeof history.last));
  };
  const Error error(FSDP_MISMATCH,
                    format_text("ranks have enqueued different collectives on NCCL communicator '{}', and NCCL cannot "
                                "take them back: rank {} "
                                "{} of them, the last {}; rank {} {}, the last {}",
                                open_[index]->connection().plan().name, host_->world_rank(rank()), mine.count,
                                last(mine), host_->world_rank(peer), theirs.count, last(theirs)),
                    static_cast<int32_t>(host_->world_rank(peer)));
  failure_.set(error);
  throw error;
}

}  // namespace fsdp::comm::nccl
