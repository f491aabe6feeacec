// SPDX-License-Identifier: Apache-2.0
// Tests ballots between ranks: the result of merging them, how often ranks meet, and which rank is named.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "shm_ranks.h"
#include "transport/exchange.h"
#include "transport/hierarchy/team.h"

namespace fsdp::transport::test {
namespace {

std::vector<Saying> random_sayings(uint32_t count, std::mt19937_64 &random) {
  std::vector<Saying> sayings(count);
  const uint64_t odds = 1 + random() % 3;
  for (Saying &saying : sayings)
    saying = {random() % odds ? uint64_t{5} : uint64_t{6}, random() % 8 == 0, random() % 4};
  return sayings;
}

// Computes the result rank by rank, as one rank with all ballots would.
void expect_ballot(const std::vector<Saying> &all, const Ballot &found, const std::string &where) {
  uint32_t odd = Ballot::nobody, troubled = Ballot::nobody, last = 0;
  uint64_t most = 0;
  for (uint32_t r = 0; r < all.size(); ++r) {
    if (all[r].same != all[0].same && odd == Ballot::nobody) odd = r;
    if (all[r].troubled && troubled == Ballot::nobody) troubled = r;
    if (all[r].waited_ns < all[last].waited_ns) last = r;
    most = std::max(most, all[r].waited_ns);
  }
  const auto seen = std::tuple(found.same, found.first, found.odd, found.troubled, found.last, found.least_waited_ns,
                               found.max_waited_ns);
  EXPECT_EQ(seen, std::tuple(all[0].same, uint32_t{0}, odd, troubled, last, all[last].waited_ns, most)) << where;
  EXPECT_EQ(found.agreed(), odd == Ballot::nobody && troubled == Ballot::nobody) << where;
}

TEST(Ballot, ComesToTheSameInAnyOrderAndGrouping) {
  std::mt19937_64 random(17);
  for (int turn = 0; turn < 2000; ++turn) {
    const std::vector<Saying> sayings = random_sayings(1 + random() % 9, random);
    std::vector<Ballot> left;
    for (uint32_t r = 0; r < sayings.size(); ++r) left.push_back(Ballot::of(r, sayings[r]));
    while (left.size() > 1) {  // merges two random ballots
      std::shuffle(left.begin(), left.end(), random);
      left[0].add(left.back());
      left.pop_back();
    }
    expect_ballot(sayings, left[0], format_text("turn {}", turn));
  }
}

// Runs hosts as threads that meet only in circles.
class CircleRoom {
 public:
  // Returns the first host's ballot, whatever the others have.
  Ballot pass(const Circle &circle, size_t level, uint32_t host, const Ballot &mine) {
    return meet(circle, level, host, circle.hosts.front() == host ? mine : Ballot()).front();
  }
  std::vector<Ballot> meet(const Circle &circle, size_t level, uint32_t host, const Ballot &mine) {
    Seats &seats = seats_of(circle, level);
    const auto me = static_cast<size_t>(std::ranges::find(circle.hosts, host) - circle.hosts.begin());
    seats.ballots[me] = mine;
    seats.there.arrive_and_wait();
    std::vector<Ballot> told = seats.ballots;
    seats.there.arrive_and_wait();  // no rank writes before all have read
    return told;
  }

 private:
  struct Seats {
    explicit Seats(size_t count) : ballots(count), there(static_cast<std::ptrdiff_t>(count)) {}
    std::vector<Ballot> ballots;
    std::barrier<> there;
  };
  Seats &seats_of(const Circle &circle, size_t level) {
    const std::lock_guard lock(mutex_);
    return seats_.try_emplace({level, circle.hosts.front()}, circle.hosts.size()).first->second;
  }
  std::mutex mutex_;
  std::map<std::pair<size_t, uint32_t>, Seats> seats_;
};

TEST(Circles, BringOneBallotToEveryHost) {
  std::mt19937_64 random(3);
  for (const uint32_t size : {2U, 3U, 4U, 16U})
    for (const uint32_t hosts : {1U, 2U, 3U, 4U, 8U, 9U, 16U, 17U, 27U, 28U, 40U}) {
      const std::vector<Saying> sayings = random_sayings(hosts, random);
      CircleRoom room;
      std::vector<Ballot> found(hosts);
      std::vector<int> met(hosts);
      std::vector<std::thread> threads;
      for (uint32_t host = 0; host < hosts; ++host)
        threads.emplace_back([&, host] {
          found[host] = fold_circles(
              circles_of(host, hosts, size), Ballot::of(host, sayings[host]),
              [&](const Circle &circle, size_t level, const Ballot &ballot) {
                ++met[host];
                return room.meet(circle, level, host, ballot);
              },
              [&](const Circle &circle, size_t level, const Ballot &ballot) {
                ++met[host];
                return room.pass(circle, level, host, ballot);
              });
        });
      for (std::thread &thread : threads) thread.join();
      const std::string where = format_text("{} hosts in circles of {}", hosts, size);
      for (const Ballot &ballot : found) expect_ballot(sayings, ballot, where);
      if (hosts <= size) {
        EXPECT_EQ(met, std::vector<int>(hosts, 1)) << where;
      }
      for (const int times : met) EXPECT_LE(times, 11) << where;  // 40 hosts in pairs make 6 levels
    }
}

// Runs all hosts in one thread, level by level up and down again.
class ByteHosts {
 public:
  ByteHosts(uint32_t hosts, uint32_t size) : hosts_(hosts), size_(size) {
    for (uint32_t h = 0; h < hosts; ++h) {
      rooms_.emplace_back(circle_room(hosts, size) * bytes, std::byte{0xee});
      for (uint64_t i = 0; i < bytes; ++i) rooms_[h][h * bytes + i] = said(h, i);
    }
  }
  // Lists each host's steps in order. Hosts that meet wait for each other, because their steps are done together.
  void run() {
    struct Step {
      uint32_t host;
      const Circle *circle;
      size_t level;
      uint64_t offset, bytes;
      bool passes;
    };
    std::vector<std::vector<Circle>> circles;
    std::vector<Step> steps;
    for (uint32_t h = 0; h < hosts_; ++h) circles.push_back(circles_of(h, hosts_, size_));
    for (uint32_t h = 0; h < hosts_; ++h) {
      std::byte *all = rooms_[h].data();
      const auto note = [&](bool passes) {
        return [&, passes](const Circle &circle, size_t level, std::byte *first, uint64_t count) {
          steps.push_back({h, &circle, level, static_cast<uint64_t>(first - all), count, passes});
          ASSERT_LE(steps.back().offset + count * (passes ? 1 : circle.hosts.size()), rooms_[h].size());
        };
      };
      gather_circles(circles[h], hosts_, all, bytes, note(false), note(true));
    }
    const auto order = [](const Step &step) {
      return step.passes ? 100 - static_cast<int>(step.level) : static_cast<int>(step.level);
    };
    std::ranges::stable_sort(steps, {}, order);
    for (const Step &step : steps) step.passes ? pass(step) : meet(step);
  }
  void expect_all(const std::string &where) const {
    for (uint32_t h = 0; h < hosts_; ++h)
      for (uint32_t of = 0; of < hosts_; ++of)
        for (uint64_t i = 0; i < bytes; ++i)
          ASSERT_EQ(rooms_[h][of * bytes + i], said(of, i)) << where << ", host " << h;
  }
  uint64_t max_peers() const {
    uint64_t most = 0;
    for (const auto &[host, peers] : peers_) most = std::max<uint64_t>(most, peers.size());
    return most;
  }

 private:
  static constexpr uint64_t bytes = 3;
  static std::byte said(uint32_t host, uint64_t i) { return static_cast<std::byte>(host * 7 + i); }
  template <class Step>
  void meet(const Step &step) {
    for (const uint32_t other : step.circle->hosts) {
      if (other != step.host) peers_[step.host].insert(other);
      const auto at = static_cast<uint64_t>(std::ranges::find(step.circle->hosts, other) - step.circle->hosts.begin());
      std::memcpy(rooms_[step.host].data() + step.offset + at * step.bytes,
                  rooms_[other].data() + step.offset + at * step.bytes, step.bytes);
    }
  }
  template <class Step>
  void pass(const Step &step) {
    const uint32_t first = step.circle->hosts.front();
    if (first != step.host)
      std::memcpy(rooms_[step.host].data() + step.offset, rooms_[first].data() + step.offset, step.bytes);
  }
  uint32_t hosts_, size_;
  std::vector<std::vector<std::byte>> rooms_;
  std::map<uint32_t, std::set<uint32_t>> peers_;
};

TEST(Circles, BringWhatEachHostSaysToEach) {
  for (const uint32_t size : {2U, 3U, 4U, 16U})
    for (const uint32_t hosts : {1U, 2U, 3U, 4U, 8U, 9U, 16U, 17U, 27U, 28U, 40U, 257U}) {
      const std::string where = format_text("{} hosts in circles of {}", hosts, size);
      ByteHosts all(hosts, size);
      all.run();
      all.expect_all(where);
      if (hosts <= size) {
        EXPECT_EQ(all.max_peers(), hosts - 1) << where;
      } else if (size == 16) {
        EXPECT_LE(all.max_peers(), 15U + 15U + 1U) << where;
      }
    }
}

void expect_well(const std::vector<std::string> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

uint64_t meetings_of(Exchange &ranks, const std::function<void()> &body) {
  const uint64_t before = ranks.meetings();
  body();
  return ranks.meetings() - before;
}

TEST(Exchange, MeetsOnceForWhatGoesWell) {
  expect_well(run_threads(3, [](Rank &rank) {
    Team &team = *rank.team;
    require(meetings_of(team, [&] { team.barrier("a barrier"); }) == 1, "a barrier");
    require(
        meetings_of(team, [&] { require(team.agree({.same = 9}, "what is so").agreed(), "they do not agree"); }) == 1,
        "an agreement");
    require(meetings_of(team, [&] { attempt_together(team, "a step", [] {}); }) == 1, "a step");
    require(meetings_of(team, [&] { agree_on(team, "a name", "the same"); }) == 1, "a name");
    // Ranks exchange the text, and then wait until every rank that arrived has read it.
    require(meetings_of(
                team,
                [&] {
                  const Error error = error_of([&] { agree_on(team, "a name", rank.rank() == 2 ? "other" : "usual"); });
                  require(error.status == FSDP_MISMATCH && error.rank == 2, error.message);
                  require(error.message == "a name differs: rank 0 says usual, and rank 2 says other", error.message);
                }) == 3,
            "a difference");
  }));
}

TEST(Exchange, NamesTheLowestThatIsOddOrInTrouble) {
  expect_well(run_threads(4, [](Rank &rank) {
    const uint32_t r = rank.rank();
    const Ballot told =
        rank.team->agree({.same = r >= 2, .troubled = r == 1 || r == 3, .waited_ns = 40 - 10 * r}, "it");
    expect_ballot({{0, false, 40}, {0, true, 30}, {1, false, 20}, {1, true, 10}}, told, "on the board");
    const Error error = error_of([&] {
      attempt_together(*rank.team, "a step", [&] {
        if (r % 2) fail(FSDP_SYSTEM, "the disk of {} is full", r);
      });
    });
    require(error.status == FSDP_SYSTEM && error.rank == 1, error.message);
    require(error.message == "rank 1: the disk of 1 is full", error.message);
  }));
}

TEST(Exchange, TellsAnAgreementFromBytesOfTheSameName) {
  const auto problems = run_threads(2, [](Rank &rank) {
    const Error error = error_of([&] {
      uint64_t value = 0, all[2];
      if (rank.rank())
        rank.team->all_gather(&value, sizeof value, all, "norm");
      else
        rank.team->barrier("norm");
    });
    require(error.status == FSDP_MISMATCH, error.message);
    require(error.message == "rank 0 called 'norm', rank 1 called 'norm' (8 bytes)", error.message);
  });
  expect_well(problems);
}

// There are 17 hosts. The first one meets its circle, then the circle of first hosts, and then the circle of the first
// hosts of these. It passes on the result twice. Memory runs out in one of these messages.
class ShortNet final : public Net {
 public:
  explicit ShortNet(int fails_at) : fails_at_(fails_at) {}
  std::vector<std::byte> address() const override { return {}; }
  const std::string &warnings() const noexcept override { return none_; }
  void join(NetJob, std::shared_ptr<Seat>, device::Device &) override {}
  std::unique_ptr<Collectives> create_collectives(std::vector<uint32_t>, uint64_t, const std::string &, bool) override {
    return nullptr;
  }
  void exchange(std::span<const uint32_t> ranks, uint64_t, const void *mine, uint64_t bytes, void *all,
                const char *) override {
    if (calls++ == fails_at_) throw std::bad_alloc();
    for (size_t r = 0; r < ranks.size(); ++r) std::memcpy(static_cast<std::byte *>(all) + r * bytes, mine, bytes);
  }
  void broadcast(std::span<const uint32_t>, uint64_t, void *, uint64_t, const char *) override {
    if (calls++ == fails_at_) throw std::bad_alloc();
  }
  uint64_t scratch_bytes(uint32_t) const noexcept override { return 0; }
  int calls = 0;

 private:
  const int fails_at_;
  const std::string none_;
};

// Its circle waits for the ballot that comes back, and would mistake the host's next message for it.
TEST(HybridTeam, TellsNothingAfterAMeetingThatBrokeOff) {
  for (int fails_at = 0; fails_at < 5; ++fails_at) {
    const auto net = std::make_shared<ShortNet>(fails_at);
    TeamPlaces places;
    for (uint32_t r = 0; r < 17; ++r) places.ranks.push_back(r), places.hosts.push_back({r});
    HybridTeam team(net, places, nullptr, 5);
    EXPECT_THROW(team.barrier("the end of a step"), std::bad_alloc);
    uint64_t value = 0, all[17];
    const auto barrier = [&] { team.barrier("the end of a step"); };
    const auto gather = [&] { team.all_gather(&value, sizeof value, all, "a norm"); };
    for (const Error &error : {error_of(barrier), error_of(gather)}) {
      EXPECT_EQ(error.status, FSDP_INVALID_STATE) << fails_at;
      EXPECT_NE(error.message.find("an earlier exchange of this team did not complete"), std::string::npos);
    }
    EXPECT_EQ(net->calls, fails_at + 1);
  }
}

}  // namespace
}  // namespace fsdp::transport::test
