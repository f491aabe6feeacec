// SPDX-License-Identifier: Apache-2.0

#include "transport/shm/team.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "transport/exchange.h"
#include "transport/shm/arena.h"
#include "transport/shm/collectives.h"
#include "transport/shm/versions.h"

namespace fsdp::transport {

namespace {

// Waits for the memory of a team's board.
class AwaitedMeeting final : public Awaited {
 public:
  AwaitedMeeting(Links &links, Parcel parcel, std::span<const uint32_t> ranks, uint64_t bytes, const std::string &what)
      : links_(links), parcel_(parcel), ranks_(ranks), bytes_(bytes), what_(what) {}
  bool come() override {
    if (!file)
      if (auto found = links_.meet(parcel_, ranks_, [this] { return create_memory_file(bytes_, what_); }))
        file = std::move(*found);
    return static_cast<bool>(file);
  }
  void sleep(uint32_t ms) override { links_.sleep(ms); }
  bool misses(uint32_t world_rank) const override { return !file && world_rank == ranks_[0]; }
  bool needs_callers() const override { return true; }
  std::string text() const override { return format_text("meeting as team '{}'", what_); }
  Fd file;

 private:
  Links &links_;
  Parcel parcel_;
  std::span<const uint32_t> ranks_;
  uint64_t bytes_;
  const std::string &what_;
};

class AwaitedParcel final : public Awaited {
 public:
  AwaitedParcel(Links &links, Parcel parcel, uint32_t from, const std::string &what)
      : links_(links), parcel_(parcel), from_(from), what_(what) {}
  bool come() override {
    if (!file)
      if (auto found = links_.take(parcel_)) file = std::move(*found);
    return static_cast<bool>(file);
  }
  void sleep(uint32_t ms) override { links_.sleep(ms); }
  bool misses(uint32_t world_rank) const override { return !file && world_rank == from_; }
  bool needs_callers() const override { return true; }
  std::string text() const override { return format_text("passing the memory of {}", what_); }
  Fd file;

 private:
  Links &links_;
  Parcel parcel_;
  uint32_t from_;
  const std::string &what_;
};

// Waits for room in a peer's mailbox.
class AwaitedRoom final : public Awaited {
 public:
  AwaitedRoom(Links &links, Parcel parcel, uint32_t to, const Fd &file, const std::string &what)
      : links_(links), parcel_(parcel), to_(to), file_(file), what_(what) {}
  bool come() override { return sent_ = sent_ || links_.send(to_, parcel_, file_); }
  void sleep(uint32_t) override { links_.sleep(1); }
  bool misses(uint32_t world_rank) const override { return !sent_ && world_rank == to_; }
  std::string text() const override { return format_text("passing the memory of {}", what_); }

 private:
  Links &links_;
  Parcel parcel_;
  uint32_t to_;
  const Fd &file_;
  const std::string &what_;
  bool sent_ = false;
};

}  // namespace

ShmTeam::ShmTeam(std::shared_ptr<Seat> seat, device::Device &device, std::vector<uint32_t> ranks, uint64_t key,
                 const std::string &what)
    : seat_(std::move(seat)), device_(device), ranks_(std::move(ranks)), key_(key) {
  seat_->watch.enter_caller();
  rank_ = static_cast<uint32_t>(std::find(ranks_.begin(), ranks_.end(), seat_->rank) - ranks_.begin());
  try {
    meet(what);
  } catch (const Error &error) {
    // There is no board yet on which the others could read the error. A rank that was interrupted may try again with
    // another team.
    if (error.status != FSDP_INTERRUPTED)
      seat_->control.accuse(FailureKind::failed, seat_->rank, format_text("rank {}: {}", seat_->rank, error.message));
    throw;
  }
}

void ShmTeam::meet(const std::string &what) {
  const uint64_t bytes = Board::size_bytes(size());
  AwaitedMeeting awaited(*seat_->links, {key_, parcels_++}, ranks_, bytes, what);
  seat_->watch.wait(awaited);
  check_memory_file(awaited.file, bytes, what);
  Mapping memory(awaited.file, bytes, Access::read_write, what);
  memory.populate(0, bytes, Access::read_write, what);
  board_ = std::make_unique<Board>(*seat_, rank_, ranks_, std::move(memory));
}

// Checks that all ranks create the same number of bytes. If they do not, the ranks exchange the numbers.
void ShmTeam::compare(const std::optional<Error> &mine, uint64_t bytes, const std::string &what) {
  const Ballot told = agree({.same = bytes, .troubled = mine.has_value()}, what.c_str());
  if (told.odd == Ballot::nobody) {
    if (told.troubled != Ballot::nobody) throw_troubled(*this, told, mine, what);
    return;
  }
  std::vector<uint64_t> all(size());
  all_gather(&bytes, sizeof bytes, all.data(), what.c_str());
  await_readers(*this);
  fail_rank(FSDP_MISMATCH, static_cast<int32_t>(ranks_[told.odd]),
            "{}: rank {} creates {} bytes of shared memory, rank {} creates {}", what, ranks_[0], all[0],
            ranks_[told.odd], all[told.odd]);
}

void ShmTeam::pass(Fd &file, uint64_t bytes, const std::string &what) {
  const Parcel parcel{key_, parcels_++};
  if (rank_ == 0) {
    for (uint32_t r = 1; r < size(); ++r) {
      AwaitedRoom room(*seat_->links, parcel, ranks_[r], file, what);
      seat_->watch.wait(room);
    }
    return;
  }
  AwaitedParcel awaited(*seat_->links, parcel, ranks_[0], what);
  seat_->watch.wait(awaited);
  check_memory_file(awaited.file, bytes, what);
  file = std::move(awaited.file);
}

template <class Prepare, class Use>
void ShmTeam::share_memory(uint64_t bytes, const std::string &what, Prepare &&prepare, Use &&use) {
  Fd file;
  const auto prepared = capture_error([&] {
    prepare();
    if (rank_ == 0) file = create_memory_file(bytes, what);
  });
  compare(prepared, bytes, what);
  pass(file, bytes, what);
  const auto used = capture_error([&] { use(file); });
  compare(used, bytes, what);
}

Mapping ShmTeam::share_words(uint64_t bytes, const std::string &what) {
  Mapping memory;
  bytes = round_up(bytes, page_size());
  share_memory(
      bytes, what, [] {},
      [&](const Fd &file) {
        memory = Mapping(file, bytes, Access::read_write, what);
        memory.populate(0, bytes, Access::read_write, what);
      });
  return memory;
}

std::unique_ptr<Arena> ShmTeam::create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                             View view) {
  std::unique_ptr<Arena> arena;
  // An arena of no bytes is one page, so callers need no special case for it.
  const uint64_t mapped = round_up(std::max<uint64_t>(bytes, 1), page_size(), what.c_str());
  share_memory(
      mapped, what,
      [&] {
        uint64_t own = 0;
        for (const Range &range : writable) own += range.bytes;
        device_.count_allocation(own, what.c_str());
        whole_pages(writable, bytes, what);
      },
      [&](const Fd &file) { arena = std::make_unique<ShmArena>(file, bytes, writable, what, view); });
  return arena;
}

std::unique_ptr<Versions> ShmTeam::create_versions(const std::string &what) {
  return std::make_unique<ShmVersions>(seat_, rank_, ranks_, share_words(ShmVersions::size_bytes(size()), what));
}

std::unique_ptr<Relay> ShmTeam::create_relay(const std::string &what) {
  const Range own{rank_ * message_staging_bytes(size()), message_staging_bytes(size())};
  auto halves = create_arena(size() * own.bytes, std::span(&own, 1), what, View::read_only);
  return std::make_unique<Relay>(std::move(halves), share_words(Relay::size_bytes(size()), what), rank_, ranks_);
}

std::unique_ptr<Collectives> ShmTeam::create_collectives(const std::string &what, const Shape &shape) {
  auto relay = shape.arenas ? nullptr : create_relay(what);
  return std::make_unique<ShmCollectives>(seat_, rank_, ranks_, shape.block,
                                          share_words(ShmCollectives::size_bytes(size()), what), std::move(relay));
}

ShmWorld::ShmWorld(std::shared_ptr<Seat> seat, device::Device &device, std::string description,
                   std::unique_ptr<Monitor> monitor)
    : seat_(std::move(seat)), device_(device), description_(std::move(description)), monitor_(std::move(monitor)) {
  seat_->control.set_membership(rank(), Membership::member);
}

ShmWorld::~ShmWorld() {
  if (seat_->control.membership(rank()) == Membership::member) seat_->control.set_membership(rank(), Membership::gone);
}

std::unique_ptr<Team> ShmWorld::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  std::vector<uint32_t> members(ranks.begin(), ranks.end());
  for (const uint32_t rank : members)
    if (rank >= size()) fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is outside [0, {})", what, rank, size());
  std::vector<uint32_t> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: a rank is named twice", what);
  if (!std::binary_search(sorted.begin(), sorted.end(), rank()))
    fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is not among the ranks of the team", what, rank());
  const uint64_t key = team_keys_.next(members);
  return std::make_unique<ShmTeam>(seat_, device_, std::move(members), key, what);
}

void ShmWorld::check() {
  seat_->control.settle();
  if (seat_->control.accused() && seat_->control.verdict().kind == FailureKind::destroyed) return;
  seat_->watch.check();
}

void ShmWorld::end(FailureKind kind, const std::string &reason) noexcept {
  try {
    seat_->control.accuse(kind, rank(), format_text("rank {} aborted: {}", rank(), reason));
  } catch (...) {  // no memory for the text: the verdict has its own short text
    seat_->control.accuse(kind, rank(), {});
  }
}

}  // namespace fsdp::transport
