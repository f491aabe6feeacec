// SPDX-License-Identifier: Apache-2.0
// A failure on one rank is refused on all ranks, and no rank goes on with the error before all have read it. Otherwise
// a slower rank would report a rank that left the job at once as the cause.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/runtime/declaration.h"
#include "memory/model_plan.h"
#include "shm_ranks.h"
#include "transport/exchange.h"
#include "transport/team.h"

namespace fsdp::transport::test {
namespace {

// A team that receives the others' messages in time, but takes long to read them.
class SlowReader final : public DeviceTeam {
 public:
  SlowReader(Rank &rank, std::atomic<int> &reads)
      : DeviceTeam(std::move(rank.team), *rank.device), slow_(rank.rank() == 0), reads_(reads) {}

  Ballot fold(const Ballot &mine, const char *what) override {
    const Ballot told = host_->fold(mine, what);
    read();
    return told;
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) override {
    auto all = host_->all_gather(mine, what);
    read();
    return all;
  }
  void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) override {
    host_->all_gather(mine, bytes, all, what);
    read();
  }
  std::unique_ptr<Collectives> create_collectives(const std::string &, const Shape &) override { return {}; }

 private:
  void read() {
    if (!slow_) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++reads_;
  }

  bool slow_;
  std::atomic<int> &reads_;
};

// refuse throws on every rank, as rank 1 requests. `exchanges` is the number of exchanges in which all ranks learn of
// rank 1's request.
void expect_read_by_all(int exchanges, const std::function<void(Team &)> &refuse) {
  std::atomic<int> reads{0};
  const auto problems = run_threads(3, [&](Rank &rank) {
    SlowReader team(rank, reads);
    const Error error = error_of([&] { refuse(team); });
    const int seen = reads;
    require(error.rank == 1, format_text("refused with: {} (of rank {})", error.message, error.rank));
    require(seen >= exchanges, format_text("goes on after {} of {} exchanges are read", seen, exchanges));
    rank.world->leave();
  });
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

TEST(Refusal, OfACommonStep) {
  expect_read_by_all(1, [](Team &team) {
    attempt_together(team, "a step", [&] {
      if (team.rank() == 1) fail(FSDP_UNSUPPORTED, "not here");
    });
  });
}

TEST(Refusal, ARefusedSealIsReadByAll) {
  expect_read_by_all(1, [](Team &team) {
    std::optional<Error> mine;
    if (team.rank() == 1) mine.emplace(FSDP_UNSUPPORTED, "not here");
    share_error(team, mine, "fsdp_seal_model");
  });
}

TEST(Refusal, OfDeclarationsThatDiffer) {
  expect_read_by_all(2, [](Team &team) {
    memory::ModelSpec spec;
    spec.mesh().ranks = {0, 1, 2};
    spec.mesh().inner_size = team.rank() == 1 ? 3 : 1;
    engine::verify_declarations(team, spec, memory::ModelPlan{}, 0);
  });
}

}  // namespace
}  // namespace fsdp::transport::test
