// SPDX-License-Identifier: Apache-2.0
// Tests the messages of the rendezvous as bytes. Written messages are read back, and all other bytes are refused.
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

#include "membership/join/message.h"
#include "transport/names.h"

namespace fsdp::membership::message {
namespace {

std::span<const std::byte> body(const std::vector<std::byte> &frame) {
  return std::span(frame).subspan(FrameHead::size_bytes);
}

const std::vector<std::byte> card = {std::byte{1}, std::byte{0}, std::byte{255}};
const Message all[] = {Join{3, 8, 1, "boot/4026531840", "node-a", "10.0.0.1:29501"},
                       Refused{-5, 2, "rank 2 has not come", 7},
                       Entries{{{3, 1, "node-a", card}, {4, 2, "node-b", {}}}},
                       Start{8, Nonce{1, 2, 3}},
                       Hello{1, 3, "0.1.0"},
                       Card{6, card},
                       Formed{},
                       Admitted{4, "node-a", "10.0.0.1"},
                       Redirect{4, "node-a", "10.0.0.1:29501"},
                       Report{accuse_rank(FailureKind::timeout, 5, "rank 5 is late"), 4},
                       Verdict{accuse_death(6)}};

// Writes the message, reads it, and returns the message that was read.
template <class Kind>
Kind read_back(const Kind &message) {
  const auto parsed = parse(Kind::kind, body(write(message)));
  EXPECT_EQ(parsed.problem, "");
  const auto *read = std::get_if<Kind>(&parsed.message);
  EXPECT_TRUE(read) << "another kind than " << Kind::kind;
  return read ? *read : Kind{};
}

// Holds an entry that owns its texts.
struct Said {
  uint32_t rank, node;
  std::string host;
  std::vector<std::byte> card;
  bool operator==(const Said &) const = default;
  RosterEntry entry() const { return {rank, node, host, card}; }
};

std::vector<Said> read_all(const Entries &entries) {
  std::vector<Said> all;
  EntryReader reader(entries.body());
  for (RosterEntry entry; reader.next(entry);)
    all.push_back({entry.rank, entry.node, std::string(entry.host), {entry.card.begin(), entry.card.end()}});
  EXPECT_EQ(reader.problem(), "");
  EXPECT_EQ(all.size(), entries.size());
  return all;
}

TEST(Message, WhatIsWrittenIsReadBack) {
  const Join join = read_back(std::get<Join>(all[0]));
  EXPECT_EQ(std::tie(join.rank, join.world_size, join.attempt), std::make_tuple(3U, 8U, 1U));
  EXPECT_EQ(std::tie(join.host_id, join.host, join.listens),
            std::make_tuple("boot/4026531840", "node-a", "10.0.0.1:29501"));
  const Refused refused = read_back(std::get<Refused>(all[1]));
  EXPECT_EQ(std::tie(refused.status, refused.rank, refused.text, refused.to),
            std::make_tuple(-5, 2, "rank 2 has not come", 7));
  const auto entries = read_all(read_back(std::get<Entries>(all[2])));
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0], (Said{3, 1, "node-a", card}));
  EXPECT_EQ(entries[1], (Said{4, 2, "node-b", {}}));
  const Start start = read_back(std::get<Start>(all[3]));
  EXPECT_EQ(std::tie(start.world_size, start.session), std::make_tuple(8U, Nonce{1, 2, 3}));
  const Hello hello = read_back(std::get<Hello>(all[4]));
  EXPECT_EQ(std::tie(hello.wire_version, hello.rank, hello.library), std::make_tuple(1U, 3U, "0.1.0"));
  const Card brought = read_back(std::get<Card>(all[5]));
  EXPECT_EQ(std::tie(brought.rank, brought.bytes), std::make_tuple(6U, card));
  read_back(Formed{});
  const Admitted admitted = read_back(std::get<Admitted>(all[7]));
  EXPECT_EQ(std::tie(admitted.rank, admitted.host, admitted.address), std::make_tuple(4U, "node-a", "10.0.0.1"));
  const Redirect redirect = read_back(std::get<Redirect>(all[8]));
  EXPECT_EQ(std::tie(redirect.rank, redirect.host, redirect.address), std::make_tuple(4U, "node-a", "10.0.0.1:29501"));
  const Report report = read_back(std::get<Report>(all[9]));
  EXPECT_EQ(std::tie(report.accusation.kind, report.accusation.rank, report.last_of),
            std::make_tuple(FailureKind::timeout, 5, 4));
  EXPECT_EQ(report.accusation.text.copy(), "rank 5 is late");
  const Verdict verdict = read_back(std::get<Verdict>(all[10]));
  EXPECT_EQ(std::tie(verdict.accusation.kind, verdict.accusation.rank), std::make_tuple(FailureKind::died, 6));
  EXPECT_TRUE(verdict.accusation.ranks.contains(6));
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
  Said said{0, 0, std::string(1000, 'x'), std::vector<std::byte>(max_card_bytes)};
  const auto frame = write(Entries{said.entry()});
  EXPECT_LE(frame.size(), FrameHead::size_bytes + longest);
  EXPECT_EQ(parse(Entries::kind, body(frame)).problem, "");
  said.card.resize(max_card_bytes + 1);
  EXPECT_EQ(parse(Entries::kind, body(write(Entries{said.entry()}))).problem,
            "a part of 16385 bytes takes 0 and 0 of the 0 before it, at most 16384 are allowed");
  EXPECT_EQ(parse(0, {}).problem, "no message has kind 0");
  EXPECT_EQ(parse(11, {}).problem, "no message has kind 11");
}

// Returns bytes from place `from` on of a sequence in which nothing repeats.
std::vector<std::byte> noise(uint32_t from, size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((from + static_cast<uint32_t>(i) + 1) * 2654435761U >> 11);
  return bytes;
}

// Writes the entries in this many frames, as rank 0 sends them. Returns the bytes of the frames.
size_t expect_frames(const std::vector<Said> &said, size_t frame_count) {
  std::vector<Entries> parts;
  for (const Said &one : said) {
    if (parts.empty() || !parts.back().takes(one.entry(), longest)) parts.emplace_back(one.rank);
    parts.back().add(one.entry());
  }
  std::vector<Said> read;
  size_t bytes = 0;
  for (const Entries &part : parts) {
    const auto frame = write(part);
    bytes += frame.size();
    EXPECT_LE(frame.size(), FrameHead::size_bytes + longest);
    for (Said &one : read_all(read_back(part))) read.push_back(std::move(one));
  }
  EXPECT_EQ(read.size(), said.size());
  EXPECT_TRUE(read == said);
  EXPECT_EQ(parts.size(), frame_count);
  return bytes;
}

TEST(Message, EntriesComeInFewFrames) {
  std::vector<Said> said;
  for (uint32_t r = 0; r < 300; ++r)
    said.push_back({r, r, "node " + std::to_string(r), noise(1000 * r, r == 7 ? max_card_bytes : 150)});
  expect_frames(said, 5);
}

// Values become longer and shorter at the front, in the middle and at the end, and the same value occurs again.
TEST(Message, EntriesFollowWhateverIsBeforeThem) {
  std::vector<Said> said;
  for (const std::string_view text :
       {"", "a", "abc", "abxc", "abc", "abc", "bc", "xbc", "xbcxbc", "xbc", "", "", "longer than that"}) {
    const auto bytes = std::as_bytes(std::span(text));
    said.push_back({static_cast<uint32_t>(said.size()), 7, std::string(text), {bytes.begin(), bytes.end()}});
  }
  expect_frames(said, 1);
}

// There are 16,384 ranks with cards of 150 bytes, which differ in a port and in their last byte.
TEST(Message, EntriesSayWhatDiffers) {
  std::vector<Said> said;
  for (uint32_t r = 0; r < 16384; ++r) {
    auto card = noise(0, 150);
    const std::string port = std::to_string(30000 + r);
    for (size_t i = 0; i < port.size(); ++i) card[60 + i] = static_cast<std::byte>(port[i]);
    card.back() = static_cast<std::byte>(r);
    said.push_back({r, r / 8, "node " + std::to_string(r / 8), std::move(card)});
  }
  EXPECT_LT(expect_frames(said, 100), 16384 * 105U);  // the bytes between the port and the end, and 16 more
}

TEST(Message, EntriesTakeNoMoreThanThereIs) {
  const auto ten = noise(0, 10);
  const auto said = [&](uint16_t front, uint16_t back, uint16_t bytes) {
    auto frame = write(Entries{{0, 0, "a", ten}, {1, 0, "a", ten}});
    const uint16_t sizes[] = {front, back, bytes};
    std::memcpy(frame.data() + frame.size() - sizeof sizes, sizes, sizeof sizes);
    return parse(Entries::kind, body(frame)).problem;
  };
  EXPECT_EQ(said(10, 0, 0), "");
  EXPECT_EQ(said(6, 4, 0), "a part says again what it shares with the one before it");
  EXPECT_EQ(said(6, 5, 0), "a part of 0 bytes takes 6 and 5 of the 10 before it, at most 16384 are allowed");
  EXPECT_EQ(said(UINT16_MAX, 2, 0),
            "a part of 0 bytes takes 65535 and 2 of the 10 before it, at most 16384 are allowed");
  EXPECT_NE(said(0, 0, 1), "");
}

// The middle of a value must not begin or end with the byte that the previous value has in that place.
TEST(Message, EntriesAreSaidInOneWay) {
  const std::vector<std::byte> before(3, std::byte{'x'});
  const auto said = [&](uint16_t front, uint16_t back, std::string_view between) {
    auto frame = write(Entries{{0, 0, "a", before}, {1, 0, "a", before}});
    const uint16_t sizes[] = {front, back, static_cast<uint16_t>(between.size())};
    std::memcpy(frame.data() + frame.size() - sizeof sizes, sizes, sizeof sizes);
    const auto bytes = std::as_bytes(std::span(between));
    frame.insert(frame.end(), bytes.begin(), bytes.end());
    return parse(Entries::kind, body(frame)).problem;
  };
  const std::string again = "a part says again what it shares with the one before it";
  EXPECT_EQ(said(1, 1, "ab"), "");
  EXPECT_EQ(said(1, 1, "xb"), again);
  EXPECT_EQ(said(1, 1, "ax"), again);
  EXPECT_EQ(said(0, 2, ""), again);
  EXPECT_EQ(said(2, 0, ""), "");
  EXPECT_EQ(said(3, 0, "x"), "") << "it is longer than the one before it";
}

TEST(Message, TextsAreForLogs) {
  auto frame = write(Refused{1, 1, "two\nlines"});
  const auto parsed = parse(Refused::kind, body(frame));
  EXPECT_EQ(std::get<Refused>(parsed.message).text, "two?lines");
  frame[frame.size() - sizeof(int32_t) - 1] = std::byte{27};  // the text's last letter
  EXPECT_EQ(parse(Refused::kind, body(frame)).problem, "a text has control characters");
  for (const auto &written : {write(Report{accuse_rank(FailureKind::failed, 1, "two\nlines")}),
                              write(Verdict{accuse_rank(FailureKind::failed, 1, "\x1b[31m")})}) {
    FrameHead head;
    ASSERT_EQ(read_head(std::span(written).first<FrameHead::size_bytes>(), longest, head), "");
    EXPECT_EQ(parse(head.kind, body(written)).problem, "a text has control characters");
  }
}

}  // namespace
}  // namespace fsdp::membership::message
