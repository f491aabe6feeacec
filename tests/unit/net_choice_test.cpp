// SPDX-License-Identifier: Apache-2.0
// Tests the job's choice of TCP or UCX from the reports of all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "transport/hierarchy/cards.h"

namespace fsdp::transport {
namespace {

const std::vector<std::byte> address(20, std::byte{9});

RankCard card(NetChoice asked, bool has_ucx, const char *obstacle = "") {
  RankCard card;
  card.asked = asked;
  if (asked != NetChoice::ucx) card.tcp = address;
  if (has_ucx) card.ucx = address;
  if (has_ucx) card.ucx_major = 1;
  card.leader = "10.0.0.1:4000";
  card.obstacle = obstacle;
  return card;
}

const std::vector<std::string> hosts{"a", "b", "c"};

NetDecision decide_net(const std::vector<RankCard> &cards) {
  NetCensus census;
  for (size_t r = 0; r < cards.size(); ++r) census.hear(cards[r], hosts[r]);
  return census.decide();
}

Error refusal_of(const std::vector<RankCard> &cards) {
  try {
    decide_net(cards);
  } catch (const Error &error) {
    return error;
  }
  return Error(FSDP_OK, "");
}

TEST(NetChoice, AutomaticTakesUcxWhereAllHaveTheHardware) {
  const RankCard with = card(NetChoice::automatic, true), without = card(NetChoice::automatic, false, "no device");
  EXPECT_TRUE(decide_net(std::vector{with, with, with}).ucx);
  for (const auto &cards : {std::vector{with, without, with}, {without, without, without}, {with, with, without}}) {
    const NetDecision decision = decide_net(cards);
    EXPECT_FALSE(decision.ucx);
    EXPECT_NE(decision.reason.find("no device"), std::string::npos) << decision.reason;
    EXPECT_NE(decision.reason.find("FSDP_NET=ucx"), std::string::npos) << decision.reason;
  }
  const std::string reason = decide_net(std::vector{with, without, without}).reason;
  EXPECT_NE(reason.find("rank 1 (b)"), std::string::npos) << reason;
}

TEST(NetChoice, WhatIsAskedForIsNotReplaced) {
  const RankCard tcp = card(NetChoice::tcp, false), ucx = card(NetChoice::ucx, true);
  EXPECT_FALSE(decide_net(std::vector{tcp, tcp, tcp}).ucx);
  EXPECT_TRUE(decide_net(std::vector{ucx, ucx, ucx}).ucx);
  const Error error = refusal_of({ucx, ucx, card(NetChoice::ucx, false, "it is not installed")});
  EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
  EXPECT_EQ(error.rank, 2);
  EXPECT_NE(error.message.find("rank 2 (c)"), std::string::npos) << error.message;
  EXPECT_NE(error.message.find("it is not installed"), std::string::npos) << error.message;
}

// The protocol between UCX 1 and UCX 2 is not specified.
TEST(NetChoice, UcxIsOfOneMajorVersion) {
  for (const NetChoice asked : {NetChoice::automatic, NetChoice::ucx}) {
    std::vector<RankCard> cards(3, card(asked, true));
    for (RankCard &one : cards) one.ucx_major = 2;
    EXPECT_TRUE(decide_net(cards).ucx);
    cards[1].ucx_major = 1;
    const std::string difference = "rank 0 (a) has UCX 2 and rank 1 (b) has UCX 1";
    if (asked == NetChoice::automatic) {
      const NetDecision decision = decide_net(cards);
      EXPECT_FALSE(decision.ucx);
      EXPECT_NE(decision.reason.find(difference), std::string::npos) << decision.reason;
      cards[2] = card(asked, false, "no device");
      EXPECT_NE(decide_net(cards).reason.find("rank 2 (c) has no RDMA"), std::string::npos);
      continue;
    }
    const Error error = refusal_of(cards);
    EXPECT_EQ(error.status, FSDP_MISMATCH);
    EXPECT_EQ(error.rank, 1);
    EXPECT_NE(error.message.find(difference), std::string::npos) << error.message;
  }
}

TEST(NetChoice, RanksThatAskForDifferentOnesAreNamed) {
  const Error error =
      refusal_of({card(NetChoice::tcp, false), card(NetChoice::tcp, false), card(NetChoice::automatic, true)});
  EXPECT_EQ(error.status, FSDP_MISMATCH);
  EXPECT_EQ(error.rank, 2);
  for (const char *word : {"'tcp' on rank 0 (a)", "'auto' on rank 2 (c)"})
    EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
}

TEST(NetChoice, IsReadFromTheEnvironment) {
  const std::pair<const char *, NetChoice> words[] = {
      {"", NetChoice::automatic}, {"auto", NetChoice::automatic}, {"tcp", NetChoice::tcp}, {"ucx", NetChoice::ucx}};
  for (const auto &[word, choice] : words) {
    ::setenv("FSDP_NET", word, 1);
    EXPECT_EQ(read_net_choice(), choice) << word;
  }
  for (const char *word : {"TCP", "tcp ", "rdma"}) {
    ::setenv("FSDP_NET", word, 1);
    EXPECT_THROW(read_net_choice(), Error) << word;
  }
  ::unsetenv("FSDP_NET");
}

TEST(NetChoice, ChecksumsAreTheSameEverywhere) {
  std::vector<RankCard> cards(3, card(NetChoice::tcp, false));
  for (RankCard &one : cards) one.protection.checksum = true;
  EXPECT_FALSE(decide_net(cards).ucx);
  cards[1].protection.checksum = false;
  const Error error = refusal_of(cards);
  EXPECT_EQ(error.status, FSDP_MISMATCH);
  EXPECT_EQ(error.rank, 1);
  for (const char *word : {"FSDP_NET_CHECKSUM", "'crc32c' on rank 0 (a)", "'none' on rank 1 (b)"})
    EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
}

TEST(NetChoice, ChecksumIsReadFromTheEnvironment) {
  ::unsetenv("FSDP_NET_CHECKSUM");
  EXPECT_FALSE(read_net_protection().checksum);
  const std::pair<const char *, bool> words[] = {{"", false}, {"none", false}, {"crc32c", true}};
  for (const auto &[word, wanted] : words) {
    ::setenv("FSDP_NET_CHECKSUM", word, 1);
    EXPECT_EQ(read_net_protection().checksum, wanted) << word;
  }
  for (const char *word : {"CRC32C", "crc32", "1", "on"}) {
    ::setenv("FSDP_NET_CHECKSUM", word, 1);
    try {
      read_net_protection();
      ADD_FAILURE() << word;
    } catch (const Error &error) {
      EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT);
      EXPECT_NE(error.message.find("none or crc32c is expected"), std::string::npos) << error.message;
    }
  }
  ::unsetenv("FSDP_NET_CHECKSUM");
}

TEST(NetChoice, EncryptionIsTheSameEverywhere) {
  std::vector<RankCard> cards(3, card(NetChoice::automatic, false));
  cards[2].protection.encryption = true;
  const Error error = refusal_of(cards);
  EXPECT_EQ(error.status, FSDP_MISMATCH);
  EXPECT_EQ(error.rank, 2);
  for (const char *word : {"FSDP_NET_ENCRYPTION", "'off' on rank 0 (a)", "'on' on rank 2 (c)"})
    EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
}

// Without the nonce every attempt of a job would have the same keys.
TEST(NetChoice, EncryptionNeedsRankZerosNonce) {
  std::vector<RankCard> cards(3, card(NetChoice::tcp, false));
  for (RankCard &one : cards) one.protection.encryption = true;
  const std::vector<std::byte> many(64, std::byte{1});
  const std::span<const std::byte> random = many;
  for (const size_t bytes : {0, 31, 64}) {
    cards[0].nonce = random.first(bytes);
    const Error error = refusal_of(cards);
    EXPECT_EQ(error.status, FSDP_MISMATCH) << bytes;
    EXPECT_EQ(error.rank, 0);
  }
  cards[0].nonce = random.first(32);
  EXPECT_FALSE(decide_net(cards).ucx);
}

TEST(NetChoice, EncryptionIsReadFromTheEnvironment) {
  const std::pair<const char *, bool> words[] = {{"", false}, {"off", false}, {"on", true}};
  for (const auto &[word, wanted] : words) {
    ::setenv("FSDP_NET_ENCRYPTION", word, 1);
    EXPECT_EQ(read_net_protection().encryption, wanted) << word;
  }
  ::setenv("FSDP_NET_ENCRYPTION", "yes", 1);
  EXPECT_THROW(read_net_protection(), Error);
  ::unsetenv("FSDP_NET_ENCRYPTION");
}

// If a rank is sent nothing, its wrong address would never be found.
TEST(JobCards, WhereMessagesReachARankIsAnAddress) {
  const auto read = [](std::string_view text) {
    const auto bytes = std::as_bytes(std::span(text));
    Roster roster;
    for (uint32_t r = 0; r < 3; ++r) {
      RankCard brought{.asked = NetChoice::tcp, .descriptors = {1024, 30}};
      const std::string_view usual = "10.0.0.1:4000";
      brought.tcp = r == 1 ? bytes : std::as_bytes(std::span(usual));
      roster.add({r, r, hosts[r], write_card(brought)});
    }
    return read_cards(roster).addresses[1].size();
  };
  for (const char *good :
       {"", "10.0.0.1:1", "255.255.255.255:65535", "[::1]:4000", "[fe80::1234:5678:9abc:def0]:65535"})
    EXPECT_EQ(read(good), std::string_view(good).size()) << good;
  for (const char *bad : {"x", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:1x",
                          "10.0.0.1.1:1", "host:4000", "[::1:4000", "\x1b[2J"}) {
    try {
      read(bad);
      ADD_FAILURE() << bad;
    } catch (const Error &error) {
      EXPECT_EQ(error.status, FSDP_MISMATCH);
      EXPECT_EQ(error.rank, 1);
      EXPECT_NE(error.message.find("rank 1 (b) says that messages reach it at '"), std::string::npos) << error.message;
      EXPECT_EQ(error.message.find('\x1b'), std::string::npos) << error.message;
    }
  }
}

TEST(NetCard, IsReadBackAndNothingElseIs) {
  RankCard written = card(NetChoice::automatic, true, "a reason");
  written.descriptors = {1024, 30};
  written.protection = {true, false};
  const std::vector<std::byte> nonce(32, std::byte{3});
  written.nonce = nonce;
  const std::vector<std::byte> bytes = write_card(written);
  const auto read = read_card(bytes);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->asked, written.asked);
  EXPECT_TRUE(std::ranges::equal(read->tcp, written.tcp));
  EXPECT_TRUE(std::ranges::equal(read->ucx, written.ucx));
  EXPECT_EQ(read->leader, written.leader);
  EXPECT_EQ(read->obstacle, written.obstacle);
  EXPECT_EQ(read->descriptors.limit, 1024u);
  EXPECT_EQ(read->descriptors.open, 30u);
  EXPECT_TRUE(read->protection.checksum);
  EXPECT_FALSE(read->protection.encryption);
  EXPECT_TRUE(std::ranges::equal(read->nonce, written.nonce));
  EXPECT_EQ(read->ucx_major, 1u);
  // A shortened card is invalid, unless only its last part is shorter.
  const size_t texts = written.leader.size() + written.obstacle.size();
  for (size_t length = 0; length < bytes.size() - texts + written.leader.size(); ++length)
    EXPECT_FALSE(read_card(std::span(bytes).first(length))) << length;
  for (size_t at = 0; at < 20; at += 4) {
    std::vector<std::byte> spoilt = bytes;
    for (size_t i = 0; i < 4; ++i) spoilt[at + i] = std::byte{0xff};
    EXPECT_FALSE(read_card(spoilt)) << "2^32 - 1 at " << at;
  }
}

}  // namespace
}  // namespace fsdp::transport
