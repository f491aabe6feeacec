// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/team.h"

#include "transport/device_team.h"
#include "transport/exchange.h"
#include "transport/nccl/choice.h"
#include "transport/nccl/collectives.h"

namespace fsdp::transport::nccl {
namespace {

// NCCL knows its memory as long as it exists.
class NcclArena final : public PartArena {
 public:
  NcclArena(std::shared_ptr<Seat> seat, uint64_t part_bytes, const std::string &what)
      : PartArena(seat->device(), part_bytes, seat->rank(), seat->size(), what), seat_(std::move(seat)) {}
  ~NcclArena() override { seat_->drop_memory(own().data()); }

 private:
  std::shared_ptr<Seat> seat_;
};

class NcclTeam final : public DeviceTeam {
 public:
  NcclTeam(std::shared_ptr<Team> host, std::shared_ptr<Seat> seat)
      : DeviceTeam(std::move(host), seat->device()), seat_(std::move(seat)) {}

  const CollectiveTraits &traits() const noexcept override { return nccl_traits; }

  std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what, View) override {
    std::unique_ptr<NcclArena> arena;
    attempt_together(*host_, what, [&] { arena = std::make_unique<NcclArena>(seat_, part_bytes, what); });
    seat_->add_memory(arena->own().data(), arena->own().size_bytes());
    return arena;
  }

  // One block of all ranks is what it does anyway, and messages are promised no more.
  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override {
    if (shape.arenas && shape.block && shape.block < size())
      fail(
          FSDP_UNSUPPORTED,
          "{}: sums in blocks of {} ranks by NCCL, which adds fp32 in an order of its own; FSDP_TRANSPORT_STAGING does "
          "it",
          what, shape.block);
    std::unique_ptr<Collectives> made;
    auto launches = seat_->open(what, what.starts_with("gather"));
    attempt_together(*host_, what,
                     [&] { made = std::make_unique<NcclCollectives>(seat_, std::move(launches), shape); });
    return made;
  }

  void register_memory(std::byte *data, uint64_t bytes, const std::string &) override {
    seat_->add_memory(data, bytes);
  }
  std::vector<Note> take_news() override { return seat_->take_news(); }
  bool ends_alike() override { return seat_->ends_alike(); }
  void cut() noexcept override { seat_->cut(); }
  void renew() override { seat_->renew(); }

 private:
  std::shared_ptr<Seat> seat_;
};

}  // namespace

std::shared_ptr<Team> create_team(std::shared_ptr<Team> host, device::Device &device, const Waiter &waiter,
                                  Failure &failure, std::string *obstacle) {
  Choice choice = choose(*host, device);
  if (!choice.obstacle.empty()) {
    if (!obstacle) {
      await_readers(*host);
      fail(FSDP_UNSUPPORTED, "NCCL cannot serve these ranks: {}", choice.obstacle);
    }
    *obstacle = std::move(choice.obstacle);
    return nullptr;
  }
  std::shared_ptr<Seat> seat;
  attempt_together(*host, "NCCL", [&] {
    seat = std::make_shared<Seat>(host, device, std::move(choice.library), choice.features, waiter, failure);
  });
  auto team = std::make_shared<NcclTeam>(std::move(host), std::move(seat));
  for (Note &note : choice.notes) team->add_note(std::move(note));
  return team;
}

const char *description() noexcept { return "opened at run time (2.19 or later)"; }

}  // namespace fsdp::transport::nccl
