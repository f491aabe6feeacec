// SPDX-License-Identifier: Apache-2.0
// Tests messages between hosts on the loopback device. The results are those of any other transport.
#include <gtest/gtest.h>

#include <map>

#include "base/settings.h"
#include "membership/seat.h"
#include "net_ranks.h"
#include "transport/call/launch.h"
#include "transport/hierarchy/team.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::test {
namespace {

class MessageSizes : public testing::TestWithParam<uint32_t> {};
#ifdef __SANITIZE_THREAD__  // as many threads as can race
INSTANTIATE_TEST_SUITE_P(NetMessages, MessageSizes, testing::Values(2, 3));
#else
INSTANTIATE_TEST_SUITE_P(NetMessages, MessageSizes, testing::Values(1, 2, 3, 4));
#endif

TEST_P(MessageSizes, AreThePlainSums) { expect_well(run_threads(GetParam(), all_messages)); }

// Chunks are so small that every call is many windows long.
TEST_P(MessageSizes, AreThePlainSumsInSmallChunks) {
  ::setenv("FSDP_NET_CHUNK_BYTES", "4096", 1);
  expect_well(run_threads(GetParam(), all_messages));
  ::unsetenv("FSDP_NET_CHUNK_BYTES");
}

TEST_P(MessageSizes, AreThePlainSumsOnTheCallingThread) {
  RankOptions options;
  options.device.overlap = false;
  expect_well(run_threads(GetParam(), all_messages, options));
}

TEST(NetMessages, DelaysDoNotMatter) {
  RankOptions options;
  options.device.delay_us = 300;
  expect_well(run_threads(3, all_messages, options));
}

TEST(NetMessages, LargeOnesAreTheBitsOfSharedMemory) {
  expect_well(run_threads(2, [](Rank &rank) {
    NetRank mine(rank);
    MessageBench over_net = mine.bench(), over_memory(rank);
    const uint64_t count = (4 << 20) + 3;
    std::vector<float> sent = rough_values(rank.rank(), count, 5), staged = sent;
    const Sum by_net = everywhere_in_place(sent.data(), count), by_memory = everywhere_in_place(staged.data(), count);
    over_net.communicator->sum(std::span(&by_net, 1), false, {1, "large"}, *over_net.stream);
    over_memory.communicator->sum(std::span(&by_memory, 1), false, {1, "large"}, *over_memory.stream);
    over_net.finish();
    over_memory.finish();
    require_same(sent.data(), staged.data(), count, "all_reduce over both");
    require(over_net.communicator->sent_bytes() == count * sizeof(float), "each byte crosses once");
    rank.meet();
  }));
}

TEST(NetMessages, SeveralCommunicatorsAtOnce) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    constexpr uint64_t count = 65'537, calls = 5;
    std::map<uint64_t, MessageBench> benches;
    std::map<uint64_t, std::vector<float>> values;
    // Ranks create communicators in different orders, so messages arrive for communicators that do not exist yet.
    for (uint64_t i = 0; i < 3; ++i) {
      const uint64_t key = 20 + (i + rank.rank()) % 3;
      MessageBench &bench = benches.emplace(key, mine.bench(key)).first->second;
      std::vector<float> &own = values[key] = rough_values(rank.rank(), count, key);
      for (uint64_t call = 0; call < calls; ++call) {
        const Sum span = everywhere_in_place(own.data() + call, count - call);
        bench.communicator->sum(std::span(&span, 1), false, {1, "one of several"}, *bench.stream);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    for (auto &[key, bench] : benches) bench.finish();
    MessageBench over_memory(rank);
    for (auto &[key, summed] : values) {
      std::vector<float> expected = rough_values(rank.rank(), count, key);
      for (uint64_t call = 0; call < calls; ++call) {
        const Sum span = everywhere_in_place(expected.data() + call, count - call);
        over_memory.communicator->sum(std::span(&span, 1), false, {1, "one of several"}, *over_memory.stream);
      }
      over_memory.finish();
      require_same(summed.data(), expected.data(), count, "one of several");
    }
    rank.meet();
  }));
}

TEST(NetMessages, ExchangesBringEachRankTheBytesOfAll) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    for (uint64_t bytes : {0, 1, 8, 1000, 3'000'000}) {
      const std::vector<std::byte> own = bytes_of(rank.rank(), bytes, bytes);
      std::vector<std::byte> all(bytes * 3 + 1, std::byte{77});
      mine.net->exchange(mine.all, exchanges_key, own.data(), bytes, all.data(), "numbers");
      for (uint32_t r = 0; r < 3; ++r)
        require_same_bytes(all.data() + r * bytes, bytes_of(r, bytes, bytes).data(), bytes,
                           fmt::format("of rank {}", r));
      require(all.back() == std::byte{77}, "wrote past its end");
    }
    rank.meet();
  }));
}

// The leaders of hosts whose ranks exchange watch each other: a cut between two hosts may touch no link of the leaders'
// tree.
TEST(NetMessages, TellTheLeadersWhichRanksExchange) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    const auto expect = [&](const std::vector<uint32_t> &peers, const char *when) {
      std::vector<uint32_t> found;
      mine.seat->control.find_data_peers([&](uint32_t peer) { found.push_back(peer); });
      require(found == peers, when);
    };
    expect({}, "before");
    if (rank.rank() < 2) {
      const auto made = mine.net->create_collectives({0, 1}, 50, "two of three");
      expect({1 - rank.rank()}, "after collectives");
    }
    uint64_t own = 1, told[3];
    mine.net->exchange(mine.all, exchanges_key, &own, sizeof own, told, "numbers");
    std::vector<uint32_t> others = mine.all;
    std::erase(others, rank.rank());
    expect(others, "after an exchange");
    rank.meet();
  }));
}

TEST(NetMessages, BroadcastsTheFirstOnes) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    const std::vector<uint32_t> order{2, 0, 1};
    for (uint64_t bytes : {0, 1, 8, 1000, 3'000'000}) {
      std::vector<std::byte> data = bytes_of(rank.rank(), bytes, bytes);
      data.push_back(std::byte{77});
      mine.net->broadcast(order, exchanges_key, data.data(), bytes, "numbers");
      require_same_bytes(data.data(), bytes_of(2, bytes, bytes).data(), bytes, "of rank 2");
      require(data.back() == std::byte{77}, "wrote past its end");
      uint64_t told[3], own = rank.rank() + bytes;
      mine.net->exchange(order, exchanges_key, &own, sizeof own, told, "between");
      for (uint32_t i = 0; i < 3; ++i) require(told[i] == order[i] + bytes, "an exchange after a broadcast");
    }
    rank.meet();
  }));
}

// Five hosts with one rank each, in circles of two. There are three levels; in some of them one host is left alone.
TEST(NetMessages, TeamsMeetInCircles) {
  expect_well(run_threads(5, [](Rank &rank) {
    NetRank mine(rank);
    TeamPlaces places;
    for (uint32_t r = 0; r < 5; ++r) places.ranks.push_back(r), places.hosts.push_back({r});
    places.rank = places.host = rank.rank();
    std::shared_ptr<Net> net = std::move(mine.net);
    HybridTeam team(net, places, nullptr, 40, 2);
    for (uint64_t bytes : {uint64_t{8}, uint64_t{1}, uint64_t{100'000}, uint64_t{64}}) {
      const std::vector<std::byte> own = bytes_of(rank.rank(), bytes, bytes);
      std::vector<std::byte> all(5 * bytes);
      team.all_gather(own.data(), bytes, all.data(), "numbers");
      for (uint32_t r = 0; r < 5; ++r)
        require_same_bytes(all.data() + r * bytes, bytes_of(r, bytes, bytes).data(), bytes,
                           fmt::format("of rank {}", r));
      require(team.agree({.same = bytes}, "a number").agreed(), "they do not agree");
      for (uint32_t odd = 1; odd < 5; ++odd) {
        const Ballot told = team.agree({.same = bytes + (rank.rank() == odd)}, "a number");
        require(told.odd == odd && told.first == 0, fmt::format("rank {} differs, not {}", odd, told.odd));
      }
      const auto texts = team.all_gather(std::as_bytes(std::span("four", rank.rank())), "texts");
      for (uint32_t r = 0; r < 5; ++r) require(texts[r].size() == r, fmt::format("the text of rank {}", r));
    }
    rank.meet();
  }));
}

TEST(NetMessages, ScratchIsWhatItSays) {
  expect_well(run_threads(2, [](Rank &rank) {
    NetRank mine(rank);
    const uint64_t boxes = 2 * 2 * ((sizeof(Fingerprint) + 65536 + 63) / 64 * 64);  // of messages of short calls
    require(mine.net->scratch_bytes(2) == 2 * 34 * 61440 + boxes, fmt::format("{} bytes", mine.net->scratch_bytes(2)));
    for (uint32_t ranks : {3, 16, 17, 100, 1000, 4000})
      require(mine.net->scratch_bytes(ranks) <= 65 << 20, fmt::format("{} ranks", ranks));
    rank.meet();
  }));
}

// fsdp-info shows the text of the list, but the value in use is a constant of another file.
TEST(NetOptions, TheListShowsTheChunkThatHolds) {
  ::unsetenv("FSDP_NET_CHUNK_BYTES");
  for (const Setting &one : settings())
    if (std::string(one.name) == "FSDP_NET_CHUNK_BYTES") {
      EXPECT_EQ(std::to_string(read_net_chunk_bytes()), one.otherwise);
      return;
    }
  FAIL() << "the list lacks FSDP_NET_CHUNK_BYTES";
}

TEST(NetOptions, AreChecked) {
  for (const char *bad : {"x", "100", "4095", "4097", "-1", "1000000000000", "99999999999999999999999"}) {
    ::setenv("FSDP_NET_CHUNK_BYTES", bad, 1);
    EXPECT_EQ(error_of([] { create_test_net(0); }).status, FSDP_INVALID_ARGUMENT) << bad;
  }
  ::unsetenv("FSDP_NET_CHUNK_BYTES");
}

}  // namespace
}  // namespace fsdp::transport::test
