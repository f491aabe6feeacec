// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/team.h"

#include "transport/device_team.h"
#include "transport/exchange.h"
#include "transport/nccl/choice.h"
#include "transport/nccl/collectives.h"

namespace fsdp::transport::nccl {
namespace {

// An arena that is registered with NCCL while it exists.
class NcclArena final : public PartArena {
 public:
  NcclArena(std::shared_ptr<Communicators> communicators, uint64_t part_bytes, const std::string &what)
      : PartArena(communicators->device(), part_bytes, communicators->rank(), communicators->size(), what),
        communicators_(std::move(communicators)) {}
  ~NcclArena() override { communicators_->drop_memory(own().data()); }

 private:
  std::shared_ptr<Communicators> communicators_;
};

class NcclTeam final : public DeviceTeam {
 public:
  NcclTeam(std::shared_ptr<Team> host, std::shared_ptr<Communicators> communicators)
      : DeviceTeam(std::move(host), communicators->device()), communicators_(std::move(communicators)) {}

  const CollectiveTraits &traits() const noexcept override { return nccl_traits; }

  std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what, View) override {
    std::unique_ptr<NcclArena> arena;
    attempt_together(*host_, what, [&] { arena = std::make_unique<NcclArena>(communicators_, part_bytes, what); });
    communicators_->add_memory(arena->own().data(), arena->own().size_bytes());
    return arena;
  }

  // NCCL always sums all ranks as one block. That is allowed for messages, whose order of additions is not promised.
  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override {
    if (shape.arenas && shape.block && shape.block < size())
      fail(
          FSDP_UNSUPPORTED,
          "{}: sums in blocks of {} ranks by NCCL, which adds fp32 in an order of its own; FSDP_TRANSPORT_STAGING does "
          "it",
          what, shape.block);
    std::unique_ptr<Collectives> made;
    auto launches = communicators_->open(what, what.starts_with("gather"));
    attempt_together(*host_, what,
                     [&] { made = std::make_unique<NcclCollectives>(communicators_, std::move(launches), shape); });
    return made;
  }

  void register_memory(std::byte *data, uint64_t bytes, const std::string &) override {
    communicators_->add_memory(data, bytes);
  }
  std::vector<Note> take_news() override { return communicators_->take_news(); }
  bool ends_alike() override { return communicators_->ends_alike(); }
  void cut() noexcept override { communicators_->cut(); }
  void renew() override { communicators_->renew(); }

 private:
  std::shared_ptr<Communicators> communicators_;
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
  std::shared_ptr<Communicators> communicators;
  attempt_together(*host, "NCCL", [&] {
    communicators =
        std::make_shared<Communicators>(host, device, std::move(choice.library), choice.features, waiter, failure);
  });
  auto team = std::make_shared<NcclTeam>(std::move(host), std::move(communicators));
  for (Note &note : choice.notes) team->add_note(std::move(note));
  return team;
}

const char *description() noexcept { return "opened at run time (2.19 or later)"; }

}  // namespace fsdp::transport::nccl
