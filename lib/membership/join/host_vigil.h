// SPDX-License-Identifier: Apache-2.0
// Rank 0's vigil, and what it knows of all who have joined.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "membership/join/branch.h"
#include "membership/join/vigil.h"

namespace fsdp::membership {

class HostVigil final : public Vigil {
 public:
  using Clock = std::chrono::steady_clock;
  struct Party {
    bool taken = false;  // a rank has joined as this one
    std::string host_id, host;
    std::optional<std::vector<std::byte>> card;
  };
  // A rank that another one has let in says so.
  using Admit = std::function<void(Branch &branch, message::Join &join)>;

  // deadline: of the whole; beyond it, waits that have a limit of their own are over.
  HostVigil(uint32_t size, Clock::time_point deadline, const Waiter &waiter, Admit admit);
  ~HostVigil() override;

  std::vector<Party> &parties() noexcept { return parties_; }
  Branches &branches() noexcept { return branches_; }
  void take(uint32_t rank, std::string host_id, std::string host);
  void set_card(uint32_t rank, std::vector<std::byte> card);
  bool complete() const noexcept { return cards_ == parties_.size(); }

  void look() override;
  Error settle(const Error &error) override;
  void finish() noexcept override;

 private:
  void hear_all();
  void hear(Branch &branch);
  // False: nothing that such a rank says.
  bool obey(Branch &branch, Frame &frame);
  void check_end(Branch &branch);
  void lose(const Branch &branch);
  void tell(const message::Message &word) noexcept;
  void report(const Error &error);
  Error conclude() const;

  const Waiter &waiter_;
  Clock::time_point deadline_, looked_{};
  Admit admit_;
  std::vector<Party> parties_;  // by rank
  size_t cards_ = 0;
  Branches branches_;
  RankSet dead_, lost_;          // lost: its host does not answer
  std::optional<Error> report_;  // of the first that gave up
  Clock::time_point found_{};    // the first of these
  std::optional<Error> end_;
  bool finished_ = false;
};

}  // namespace fsdp::membership
