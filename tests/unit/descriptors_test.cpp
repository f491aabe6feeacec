// SPDX-License-Identifier: Apache-2.0
// A rank whose limit of descriptors is too low says so before it runs out of them. All ranks report it when they meet,
// and the ranks of a mesh report it when their communicators are made.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <numeric>

#include "base/fd.h"
#include "membership/tree/plan.h"
#include "net_ranks.h"
#include "transport/hierarchy/cards.h"
#include "transport/hierarchy/team.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::test {
namespace {

constexpr uint32_t for_refuge = 8 + 8;  // guests of a refuge, and refuges to try

void expect_words(const Error &error, std::initializer_list<const char *> words) {
  for (const char *word : words)
    EXPECT_NE(error.message.find(word), std::string::npos) << word << ": " << error.message;
}

TEST(Descriptors, AreNeededByLeaders) {
  for (uint32_t node = 0; node < 3; ++node) {
    EXPECT_EQ(need_of_leader(node, 3).control, (node == 0 ? 2 : 1) + for_refuge) << node;
    EXPECT_EQ(need_of_leader(node, 3).messages, 2) << node;
  }
  EXPECT_EQ(need_of_leader(0, 2).control, 1) << "there is no other one to turn to";
  // The tree has degree 64. The circles have four hosts each, and their first hosts form circles again.
  EXPECT_EQ(need_of_leader(0, 2048).control, 64 + for_refuge);
  EXPECT_EQ(need_of_leader(31, 2048).control, 1 + 63 + for_refuge) << "the last of the second level";
  EXPECT_EQ(need_of_leader(2047, 2048).control, 1 + for_refuge);
  EXPECT_EQ(need_of_leader(0, 2048).messages, 5 * 3 + 1);
  EXPECT_EQ(need_of_leader(16, 2048).messages, 3 * 3);
  EXPECT_EQ(need_of_leader(2047, 2048).messages, 3);
  EXPECT_EQ(need_of_leader(5, 16).messages, 15) << "few meet at once";
}

// The counts that the tree and the circles give are the numbers of their connections.
TEST(Descriptors, AreCountedAsTheyAreNeeded) {
  for (const uint32_t hosts : {1, 2, 15, 16, 17, 64, 65, 66, 255, 257, 4097})
    for (uint32_t host = 0; host < hosts; ++host) {
      for (const uint32_t size : {4, 16}) {
        uint32_t neighbours = 0;
        for (const Circle &circle : circles_of(host, hosts, size))
          neighbours += static_cast<uint32_t>(circle.hosts.size()) - 1;
        ASSERT_EQ(neighbours_in_circles(host, hosts, size), neighbours) << host << " of " << hosts;
      }
      ASSERT_EQ(child_count_in_tree(host, hosts), children_in_tree(host, hosts).size()) << host << " of " << hosts;
    }
}

// Two ranks on each of three hosts.
struct Carried {
  Carried() {
    for (Descriptors &each : of) each = {1024, 30};
  }
  Error error() const {
    Roster roster;
    for (uint32_t r = 0; r < 6; ++r)
      roster.add({r, r / 2, std::string(1, static_cast<char>('a' + r / 2)), write_card({.descriptors = of[r]})});
    return error_of([&] { read_cards(roster); });
  }
  Descriptors of[6];
};

TEST(Descriptors, ARankThatLacksThemIsNamed) {
  Carried carried;
  const uint32_t need = 1 + for_refuge + 2 + spare_descriptors;
  carried.of[2] = {need + 50, 50};
  carried.of[3] = {need + 46, 50};
  EXPECT_EQ(carried.error().status, FSDP_OK);
  carried.of[2] = {need + 49, 50};
  const Error error = carried.error();
  EXPECT_EQ(error.status, FSDP_SYSTEM);
  EXPECT_EQ(error.rank, 2);
  EXPECT_EQ(error.origin, FSDP_ORIGIN_OS);
  EXPECT_EQ(error.origin_code, EMFILE);
  expect_words(error, {"rank 2 (b): it needs 115 more descriptors (17 for connections to the leaders", "2 for messages",
                       "may have 164 and has 50", "raise the limit to 165 or more (ulimit -n;"});
  carried.of[2] = {1024, 30};
  carried.of[3] = {spare_descriptors + 49, 50};
  EXPECT_EQ(carried.error().rank, 3) << "also one that does not lead";
}

TEST(Descriptors, AreCounted) {
  const Descriptors before = count_descriptors();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(before.limit, std::min<rlim_t>(limit.rlim_cur, UINT32_MAX));
  std::vector<Fd> more;
  for (int i = 0; i < 5; ++i) more.emplace_back(::dup(0));
  EXPECT_EQ(count_descriptors().open, before.open + 5);
}

// the count itself takes a descriptor
TEST(Descriptors, NoneIsLeftToCountThem) {
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  rlimit low = usual;
  const Fd highest(::dup(0));  // all numbers below it are taken
  low.rlim_cur = static_cast<rlim_t>(highest.get()) + 1;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const Descriptors none = count_descriptors();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
  EXPECT_EQ(none.open, low.rlim_cur);
  EXPECT_EQ(none.limit, low.rlim_cur);
  EXPECT_NE(find_shortage(none, {}), "");
}

// No process listens at the peers' addresses, and no peer is waited for.
struct Crowd {
  Crowd(Rank &rank, uint32_t size)
      : seat(create_lone_seat(0, size, rank.waiter, rank.failure)), net(create_tcp_net(0, "127.0.0.1")) {
    const std::string nowhere = "127.0.0.1:1";
    const auto *bytes = reinterpret_cast<const std::byte *>(nowhere.data());
    net->join(test_job(std::vector<std::vector<std::byte>>(size, {bytes, bytes + nowhere.size()})), seat, *rank.device);
  }
  void connect(uint32_t first, uint32_t end, uint64_t key) {
    std::vector<uint32_t> ranks{0};
    for (uint32_t r = std::max(first, 1U); r < end; ++r) ranks.push_back(r);
    made.push_back(net->create_collectives(std::move(ranks), key, "outer axis", false));
  }
  std::shared_ptr<Seat> seat;
  std::unique_ptr<Net> net;
  std::vector<std::unique_ptr<Collectives>> made;
};

TEST(Descriptors, ARankHas256PeersAtMost) {
  const auto problems = run_threads(1, [](Rank &rank) {
    Crowd crowd(rank, 300);
    const Error at_once = error_of([&] { crowd.connect(0, 258, 1); });
    EXPECT_EQ(at_once.status, FSDP_UNSUPPORTED);
    EXPECT_EQ(at_once.rank, 0);
    expect_words(at_once, {"outer axis: rank 0 would exchange data with 257 ranks", "with 256 at most"});
    crowd.connect(0, 200, 2);
    crowd.connect(100, 257, 3);
    const Error together = error_of([&] { crowd.connect(250, 258, 4); });
    EXPECT_EQ(together.status, FSDP_UNSUPPORTED);
    crowd.connect(1, 257, 5);
    crowd.made.clear();
    const Error later = error_of([&] { crowd.connect(250, 258, 6); });
    EXPECT_EQ(later.status, FSDP_UNSUPPORTED) << "connections last";
    expect_words(later, {"in the life of a context"});
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Descriptors, AreCheckedForEachPeer) {
  const auto problems = run_threads(1, [](Rank &rank) {
    Crowd crowd(rank, 300);
    rlimit usual{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
    // Connections to unreachable addresses are made and fail.
    rlimit low = usual;
    low.rlim_cur = count_descriptors().open + spare_descriptors + 100;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    const Error error = error_of([&] { crowd.connect(0, 102, 1); });
    const Error none = error_of([&] { crowd.connect(0, 61, 2); });
    const Error together = error_of([&] { crowd.connect(61, 120, 3); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
    EXPECT_EQ(error.status, FSDP_SYSTEM);
    EXPECT_EQ(error.rank, 0);
    EXPECT_EQ(error.origin_code, EMFILE);
    expect_words(error, {"rank 0: it needs 197 more descriptors (0 for connections to the leaders", "101 for messages",
                         fmt::format("may have {} and has", low.rlim_cur).c_str()});
    EXPECT_EQ(none.status, FSDP_OK) << none.message;
    EXPECT_EQ(together.status, FSDP_SYSTEM) << "those that are expected count";
    crowd.connect(0, 120, 4);
  });
  EXPECT_EQ(problems[0], "");
}

// This also holds for a rank that exchanges for its host in a mesh.
TEST(Descriptors, AreCheckedForExchanges) {
  const auto problems = run_threads(1, [](Rank &rank) {
    Crowd crowd(rank, 300);
    rlimit usual{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
    rlimit low = usual;
    low.rlim_cur = count_descriptors().open + spare_descriptors + 100;
    std::vector<uint32_t> ranks(200);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<uint64_t> all(ranks.size());
    const uint64_t mine = 0;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    const Error error = error_of([&] { crowd.net->exchange(ranks, 5, &mine, sizeof mine, all.data(), "exchange"); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
    EXPECT_EQ(error.status, FSDP_SYSTEM);
    EXPECT_EQ(error.origin_code, EMFILE);
    expect_words(error, {"199 for messages"});
  });
  EXPECT_EQ(problems[0], "");
}

}  // namespace
}  // namespace fsdp::transport::test
