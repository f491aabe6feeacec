// SPDX-License-Identifier: Apache-2.0
// The messages of the rendezvous as bytes: what is written is read back, and nothing else is a message.
#include <gtest/gtest.h>

#include "comm/bootstrap/message.h"

namespace fsdp::comm::message {
namespace {

std::span<const std::byte> body(const std::vector<std::byte> &frame) {
  return std::span(frame).subspan(FrameHead::size_bytes);
}

const std::vector<std::byte> card = {std::byte{1}, std::byte{0}, std::byte{255}};
const Message all[] = {Join{3, 8, 1, "boot/4026531840", "node-a"},
                       Refusal{-5, 2, "rank 2 has not come"},
                       Entry{3, 1, "node-a", card},
                       Start{8, Nonce{1, 2, 3}},
                       Hello{1, 3, "0.1.0"},
                       Card{card},
                       Formed{}};

TEST(Message, WhatIsWrittenIsReadBack) {
  const auto frame = write(all[0]);
  const auto parsed = parse(Join::kind, body(frame));
  const auto *join = std::get_if<Join>(&parsed.message);
  ASSERT_TRUE(join) << parsed.problem;
  EXPECT_EQ(join->rank, 3U);
  EXPECT_EQ(join->world_size, 8U);
  EXPECT_EQ(join->attempt, 1U);
  EXPECT_EQ(join->host_id, "boot/4026531840");
  EXPECT_EQ(join->host, "node-a");
}

TEST(Message, NoPrefixAndNoExtensionIsOne) {
  for (const Message &message : all) {
    const auto frame = write(message);
    const uint32_t kind = std::visit([](const auto &value) { return value.kind; }, message);
    const auto whole = body(frame);
    EXPECT_EQ(parse(kind, whole).problem, "");
    for (size_t bytes = 0; bytes < whole.size(); ++bytes)
      EXPECT_NE(parse(kind, whole.first(bytes)).problem, "") << kind << ": " << bytes;
    std::vector<std::byte> more(whole.begin(), whole.end());
    more.push_back({});
    EXPECT_EQ(parse(kind, more).problem, "1 bytes follow the message");
  }
}

TEST(Message, LimitsHold) {
  Entry entry;
  entry.host = std::string(1000, 'x');
  entry.card.resize(most_card_bytes);
  const auto frame = write(entry);
  EXPECT_LE(frame.size(), FrameHead::size_bytes + longest);
  EXPECT_EQ(parse(Entry::kind, body(frame)).problem, "");
  entry.card.resize(most_card_bytes + 1);
  EXPECT_EQ(parse(Entry::kind, body(write(entry))).problem, "a part announces 16385 bytes, at most 16384 are allowed");
  EXPECT_EQ(parse(0, {}).problem, "no message has kind 0");
  EXPECT_EQ(parse(8, {}).problem, "no message has kind 8");
}

TEST(Message, TextsAreForLogs) {
  auto frame = write(Refusal{1, 1, "two\nlines"});
  const auto parsed = parse(Refusal::kind, body(frame));
  EXPECT_EQ(std::get<Refusal>(parsed.message).text, "two?lines");
  frame.back() = std::byte{27};
  EXPECT_EQ(parse(Refusal::kind, body(frame)).problem, "a text has control characters");
}

}  // namespace
}  // namespace fsdp::comm::message
