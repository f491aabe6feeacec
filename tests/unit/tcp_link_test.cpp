// SPDX-License-Identifier: Apache-2.0
// Tests frames of one connection. All sent frames arrive, however the network splits them. A frame that does not fit
// ends the connection and writes no memory.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/error.h"
#include "membership/wire/endpoint.h"
#include "transport/message/tcp/link.h"
#include "transport/names.h"

namespace fsdp::transport::tcp {
namespace {

using messages::Header;
using messages::Kind;
using messages::Place;

constexpr uint32_t peer = 3;

struct Pair {
  Pair() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
      throw std::runtime_error("pair");
    near = Fd(ends[0]);
    far = Fd(ends[1]);
  }
  Fd near, far;
};

Header header_of(Kind kind, uint64_t chunk, uint64_t bytes) {
  Header header{};
  header.magic = messages::header_magic;
  header.kind = kind;
  header.from = peer;
  header.key = 7;
  header.chunk = chunk;
  header.bytes = bytes;
  return header;
}

// Records everything that arrives.
class Notes final : public Sink {
 public:
  bool control(const Header &header, const std::byte *payload, uint64_t bytes) override {
    controls.push_back({header.chunk, {payload, payload + bytes}});
    return takes_controls;
  }
  Place place(const Header &header) override {
    if (misfits) return {nullptr, true};
    if (header.chunk == placeless) return {};
    std::vector<std::byte> &chunk = chunks[header.chunk];
    chunk.assign(header.bytes + 1, std::byte{0xee});  // one more byte, to detect writes behind the end
    return {chunk.data()};
  }
  void arrived(const Header &header) override { came.push_back(header.chunk); }

  std::vector<std::pair<uint64_t, std::vector<std::byte>>> controls;
  std::map<uint64_t, std::vector<std::byte>> chunks;
  std::vector<uint64_t> came;
  bool takes_controls = true, misfits = false;
  uint64_t placeless = UINT64_MAX;  // a chunk with this number has no place
};

std::vector<std::byte> body_of(uint64_t chunk, uint64_t bytes) {
  std::vector<std::byte> body(bytes);
  for (uint64_t i = 0; i < bytes; ++i) body[i] = static_cast<std::byte>((chunk * 31 + i * 7 + i / 251) & 0xff);
  return body;
}

OutFrame control_frame(uint64_t sequence, uint64_t chunk, uint64_t bytes) {
  OutFrame frame = make_frame(header_of(Kind::credit, chunk, 0), sequence, bytes);
  const auto body = body_of(chunk, bytes);
  if (bytes) std::memcpy(frame.control, body.data(), bytes);
  return frame;
}

OutFrame data_frame(uint64_t sequence, uint64_t chunk, const std::vector<std::byte> &body) {
  OutFrame frame = make_frame(header_of(Kind::data, chunk, body.size()), sequence, body.size());
  static const std::byte none{};
  frame.data = body.empty() ? &none : body.data();
  return frame;
}

// Before an end that this rank makes, it sends no more data, and nothing that would follow the data.
TEST(TcpLink, LastWordsAreThoseBeforeTheData) {
  Pair pair;
  Link out(std::move(pair.near), {0, peer, true}), in(std::move(pair.far), {peer, 0, true});
  const auto body = body_of(1, 100);
  std::vector<OutFrame> frames{control_frame(0, 1, 30), control_frame(1, 2, 0), data_frame(2, 3, body),
                               control_frame(3, 4, 8)};
  out.take(frames);
  out.send_last_words();
  Notes notes;
  in.read(notes);
  ASSERT_EQ(notes.controls.size(), 2U);
  EXPECT_EQ(notes.controls[0], std::make_pair(uint64_t{1}, body_of(1, 30)));
  EXPECT_EQ(notes.controls[1].first, 2U);
  EXPECT_TRUE(notes.chunks.empty());
  EXPECT_TRUE(in.open()) << in.problem();
}

// The rest of a partly sent message is still sent. Behind half a chunk nothing is sent, because the peer would mistake
// it for data.
TEST(TcpLink, LastWordsGoOnWhereTheyStopped) {
  const auto body = body_of(1, 100);
  const OutFrame word = control_frame(0, 1, 30);
  for (const bool data : {false, true}) {
    Pair pair;
    Link out(std::move(pair.near), {0, peer});
    std::vector<OutFrame> frames{data ? data_frame(0, 3, body) : word, control_frame(1, 2, 0)};
    frames.front().sent = 10;
    out.take(frames);
    out.send_last_words();
    std::array<std::byte, 1000> bytes;
    const ssize_t count = ::recv(pair.far.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    EXPECT_EQ(count, data ? -1 : static_cast<ssize_t>(word.bytes() - 10 + control_frame(1, 2, 0).bytes()));
  }
}

// Control frames alternate with chunks of all lengths, through a socket that is sometimes full.
void carry_frames_in_order(bool checksum) {
  Pair pair;
  Link out(std::move(pair.near), {0, peer, checksum}), in(std::move(pair.far), {peer, 0, checksum});
  std::vector<std::vector<std::byte>> bodies;
  for (const uint64_t bytes : {0, 1, 63, 4000, 4096, 5000, 61440, 300'000, 0, 8})
    bodies.push_back(body_of(bodies.size(), bytes));
  std::vector<OutFrame> frames;
  for (uint64_t i = 0; i < bodies.size(); ++i) {
    frames.push_back(control_frame(2 * i, 100 + i, i * messages::longest_control / bodies.size()));
    frames.push_back(data_frame(2 * i + 1, i, bodies[i]));
  }
  out.take(frames);
  EXPECT_TRUE(frames.empty());
  Notes notes;
  std::vector<Header> sent;
  bool was_full = false;
  for (int i = 0; i < 10'000 && notes.came.size() < bodies.size(); ++i) {
    if (out.writing()) out.write(sent);
    was_full |= out.full();
    if (i % 3 == 2) in.read(notes);
  }
  ASSERT_TRUE(out.open() && in.open()) << out.problem() << in.problem();
  EXPECT_TRUE(was_full) << "the socket took all at once";
  EXPECT_FALSE(out.writing());
  EXPECT_EQ(sent.size(), bodies.size()) << "of data alone";
  for (uint64_t i = 0; i < bodies.size(); ++i) {
    EXPECT_EQ(notes.came[i], i);
    EXPECT_EQ(notes.chunks[i].back(), std::byte{0xee}) << "chunk " << i << ": written behind its end";
    notes.chunks[i].pop_back();
    EXPECT_EQ(notes.chunks[i], bodies[i]) << "chunk " << i;
    EXPECT_EQ(notes.controls[i].first, 100 + i);
    EXPECT_EQ(notes.controls[i].second, body_of(100 + i, i * messages::longest_control / bodies.size()));
  }
}

TEST(TcpLink, CarriesFramesInOrder) { carry_frames_in_order(false); }
TEST(TcpLink, CarriesFramesInOrderWithChecksums) { carry_frames_in_order(true); }

std::vector<std::byte> bytes_of(const std::vector<OutFrame> &frames) {
  std::vector<std::byte> bytes;
  for (const OutFrame &frame : frames) {
    const auto *head = reinterpret_cast<const std::byte *>(&frame.head);
    bytes.insert(bytes.end(), head, head + sizeof frame.head);
    bytes.insert(bytes.end(), frame.payload(), frame.payload() + frame.head.payload_bytes);
  }
  return bytes;
}

void put(const Fd &socket, const std::byte *bytes, size_t count) {
  ASSERT_EQ(::send(socket.get(), bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
}

TEST(TcpLink, DoesNotMindWhereTheNetworkCuts) {
  const auto body = body_of(5, 1000);
  const auto bytes = bytes_of({control_frame(0, 1, 20), data_frame(1, 5, body), control_frame(2, 2, 0)});
  for (size_t piece = 1; piece < 400; piece += piece < 20 ? 1 : 37) {
    Pair pair;
    Link in(std::move(pair.far), {peer});
    Notes notes;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      put(pair.near, bytes.data() + at, std::min(piece, bytes.size() - at));
      in.read(notes);
    }
    ASSERT_TRUE(in.open()) << in.problem();
    ASSERT_EQ(notes.controls.size(), 2u) << "pieces of " << piece;
    ASSERT_EQ(notes.came, (std::vector<uint64_t>{5})) << "pieces of " << piece;
    notes.chunks[5].pop_back();
    EXPECT_EQ(notes.chunks[5], body);
  }
}

// A chunk has no place if its call was given up here.
TEST(TcpLink, DropsWhatHasNoPlaceAndGoesOn) {
  for (const uint64_t bytes : {1, 4000, 100'000}) {
    Pair pair;
    Link out(std::move(pair.near), {0}), in(std::move(pair.far), {peer});
    const auto dropped = body_of(1, bytes), kept = body_of(2, 700);
    std::vector<OutFrame> frames{data_frame(0, 1, dropped), control_frame(1, 9, 4), data_frame(2, 2, kept)};
    out.take(frames);
    Notes notes;
    notes.placeless = 1;
    std::vector<Header> sent;
    for (int i = 0; i < 1000 && notes.came.empty(); ++i) {
      if (out.writing()) out.write(sent);
      in.read(notes);
    }
    ASSERT_TRUE(in.open()) << in.problem();
    EXPECT_EQ(notes.controls.size(), 1u) << bytes;
    EXPECT_EQ(notes.came, (std::vector<uint64_t>{2})) << bytes;
    notes.chunks[2].pop_back();
    EXPECT_EQ(notes.chunks[2], kept) << bytes;
  }
}

TEST(TcpLink, KnowsWhichChunkIsIncomplete) {
  Pair pair;
  Link in(std::move(pair.far), {peer});
  const auto body = body_of(4, 500);
  const auto bytes = bytes_of({data_frame(0, 4, body)});
  Notes notes;
  put(pair.near, bytes.data(), bytes.size() - 1);
  in.read(notes);
  ASSERT_NE(in.incomplete(), nullptr);
  EXPECT_EQ(in.incomplete()->chunk, 4u);
  EXPECT_TRUE(notes.came.empty());
  pair.near.reset();
  in.read(notes);
  EXPECT_FALSE(in.open());
  EXPECT_EQ(in.problem(), "the peer closed the connection");
  EXPECT_NE(in.incomplete(), nullptr) << "who closes it tells its receiver";
}

TEST(TcpLink, WhatDoesNotFitEndsTheConnection) {
  struct Case {
    const char *what;
    void (*spoil)(TcpFrameHead &);
    const char *problem;
  };
  const Case cases[] = {
      {"magic", [](TcpFrameHead &head) { head.magic ^= 1; }, "what came is no frame"},
      {"header's magic", [](TcpFrameHead &head) { head.header.magic ^= 0x8000; }, "what came is no frame"},
      {"sequence, too high", [](TcpFrameHead &head) { ++head.sequence; }, "a frame is missing, or came twice"},
      {"sequence, 2^63", [](TcpFrameHead &head) { head.sequence = uint64_t{1} << 63; },
       "a frame is missing, or came twice"},
      {"another rank", [](TcpFrameHead &head) { head.header.from = peer + 1; }, "a frame of another rank"},
      {"kind 0", [](TcpFrameHead &head) { head.header.kind = Kind{0}; }, "a frame of an unknown kind"},
      {"a greeting", [](TcpFrameHead &head) { head.header.kind = Kind::greeting; }, "a frame of an unknown kind"},
      {"kind 2^31", [](TcpFrameHead &head) { head.header.kind = Kind{1U << 31}; }, "a frame of an unknown kind"},
      {"length of the data", [](TcpFrameHead &head) { ++head.payload_bytes; }, "a payload of another length"},
      {"a chunk of 2^63", [](TcpFrameHead &head) { head.header.bytes = uint64_t{1} << 63; },
       "a payload of another length"},
      {"a chunk of 2^32 more", [](TcpFrameHead &head) { head.header.bytes += uint64_t{1} << 32; },
       "a payload of another length"},
      {"a long control frame",
       [](TcpFrameHead &head) {
         head.header.kind = Kind::call;
         head.header.bytes = messages::longest_control;
         head.payload_bytes = messages::longest_control + 1;
       },
       "a frame that is too long"},
      {"a call whose payload has another length",
       [](TcpFrameHead &head) {
         head.header.kind = Kind::call;
         head.header.bytes = messages::longest_control + 2;
         head.payload_bytes = messages::longest_control + 1;
       },
       "a payload of another length"},
      {"the longest control frame",
       [](TcpFrameHead &head) {
         head.header.kind = Kind::ended;
         head.payload_bytes = UINT32_MAX;
       },
       "a frame that is too long"},
  };
  const auto body = body_of(1, 200);
  for (const Case &one : cases) {
    Pair pair;
    Link in(std::move(pair.far), {peer});
    OutFrame frame = data_frame(0, 1, body);
    one.spoil(frame.head);
    Notes notes;
    put(pair.near, reinterpret_cast<const std::byte *>(&frame.head), sizeof frame.head);
    put(pair.near, body.data(), body.size());
    in.read(notes);
    EXPECT_EQ(in.problem(), one.problem) << one.what;
    EXPECT_EQ(in.code(), EPROTO) << one.what;
    EXPECT_TRUE(notes.chunks.empty() && notes.controls.empty() && notes.came.empty()) << one.what;
    in.read(notes);
    EXPECT_TRUE(notes.chunks.empty()) << one.what << ": nothing is read any more";
  }
}

// Returns the frames that a link receives from these bytes, with or without checksums.
struct Heard {
  Heard(const std::vector<std::byte> &bytes, bool checksum) {
    Pair pair;
    Link in(std::move(pair.far), {peer, 0, checksum});
    put(pair.near, bytes.data(), bytes.size());
    for (int i = 0; i < 4; ++i) in.read(notes);
    problem = in.problem();
    code = in.code();
    lost = in.incomplete() != nullptr;
  }
  Notes notes;
  std::string problem;
  int code;
  bool lost;
};

// One bit of every byte changes: of heads, messages and a chunk. The link accepts no changed byte as valid.
TEST(TcpLink, AChangedBitIsNoticedByTheChecksum) {
  const auto body = body_of(5, 1000);
  std::vector<OutFrame> frames{control_frame(0, 1, 20), data_frame(1, 5, body)};
  for (OutFrame &frame : frames) seal(frame);
  const auto right = bytes_of(frames);
  ASSERT_EQ(Heard(right, true).notes.came.size(), 1u) << Heard(right, true).problem;
  const size_t chunk_at = right.size() - body.size();
  int passed = 0;
  for (size_t at = 0; at < right.size(); ++at) {
    auto bytes = right;
    bytes[at] ^= static_cast<std::byte>(1 << at % 8);
    const Heard heard(bytes, true);
    ASSERT_EQ(heard.code, EBADMSG) << at << ": " << heard.problem;
    ASSERT_NE(heard.problem.find("from rank 3 to rank 0 was changed on its way"), std::string::npos) << heard.problem;
    ASSERT_TRUE(heard.notes.came.empty()) << at;
    ASSERT_EQ(heard.notes.controls.size(), at < sizeof(TcpFrameHead) + 20 ? 0u : 1u) << at;
    if (at < chunk_at) continue;
    ASSERT_NE(heard.problem.find("chunk 5 of call 0 (1000 bytes) from rank 3"), std::string::npos) << heard.problem;
    ASSERT_TRUE(heard.lost) << "who closes it tells its receiver";
    passed += !Heard(bytes, false).notes.came.empty();
  }
  EXPECT_EQ(passed, 1000) << "without sums nobody sees it";
}

TEST(TcpLink, AReplayedFrameEndsIt) {
  Pair pair;
  Link in(std::move(pair.far), {peer});
  const auto bytes = bytes_of({control_frame(0, 1, 8), control_frame(0, 1, 8)});
  Notes notes;
  put(pair.near, bytes.data(), bytes.size());
  in.read(notes);
  EXPECT_EQ(notes.controls.size(), 1u);
  EXPECT_EQ(in.problem(), "a frame is missing, or came twice");
}

TEST(TcpLink, WhatItsTakerRefusesEndsIt) {
  const auto body = body_of(1, 200);
  Pair one, two;
  Link first(std::move(one.far), {peer}), second(std::move(two.far), {peer});
  Notes notes;
  notes.misfits = true;
  notes.takes_controls = false;
  const auto chunk = bytes_of({data_frame(0, 1, body)}), control = bytes_of({control_frame(0, 1, 3)});
  put(one.near, chunk.data(), chunk.size());
  put(two.near, control.data(), control.size());
  first.read(notes);
  second.read(notes);
  EXPECT_EQ(first.problem(), "a chunk for which no call waits");
  EXPECT_EQ(second.problem(), "messages for communicators that do not exist here");
}

// A peer has ended. Its earlier messages are read, even by a rank that finds that it can no longer write.
TEST(TcpLink, LastWordsAreHeardAfterAWriteThatFailed) {
  std::string problem;
  const Fd listener = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).front(), 1);
  int code = 0;
  Fd theirs = begin_connecting(Endpoint::local(listener), code), mine;
  for (int i = 0; i < 1000 && !(mine = accept_from(listener)); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Link link(std::move(mine), {peer});
  const auto words = bytes_of({control_frame(0, 1, 60)});
  put(theirs, words.data(), words.size());
  theirs.reset();
  std::vector<Header> sent;
  uint64_t sequence = 0;
  for (int i = 0; i < 1000 && (i == 0 || !link.writing()); ++i) {  // until the kernel has noticed the end
    std::vector<OutFrame> frames{control_frame(sequence++, 9, 8)};
    link.take(frames);
    link.write(sent);
    if (!link.writing() && !link.unsent().empty()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_FALSE(link.unsent().empty()) << "the write did not fail";
  ASSERT_TRUE(link.open()) << link.problem();
  Notes notes;
  for (int i = 0; i < 3; ++i) link.read(notes);
  ASSERT_EQ(notes.controls.size(), 1u);
  EXPECT_EQ(notes.controls[0].second, body_of(1, 60));
  EXPECT_FALSE(link.open());
  EXPECT_NE(link.code(), 0);
}

// Some bytes of a valid conversation are changed. A link accepts them or ends, and writes only into its places.
TEST(TcpLink, RandomBytesAreTakenOrRefused) {
  const auto body = body_of(5, 300);
  const auto right =
      bytes_of({control_frame(0, 1, 20), data_frame(1, 5, body), control_frame(2, 2, 0), data_frame(3, 6, body)});
  std::minstd_rand random(20261125);
  int ended = 0;
  for (int trial = 0; trial < 5'000; ++trial) {
    std::vector<std::byte> bytes = right;
    for (uint32_t changes = random() % 4; changes > 0; --changes)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random() & 0xff);
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    if (random() % 8 == 0)
      for (std::byte &byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
    Pair pair;
    Link in(std::move(pair.far), {peer});
    Notes notes;
    put(pair.near, bytes.data(), bytes.size());
    for (int i = 0; i < 4; ++i) in.read(notes);
    ended += !in.open();
    for (const auto &[chunk, kept] : notes.chunks) ASSERT_EQ(kept.back(), std::byte{0xee});
  }
  EXPECT_GT(ended, 1'000);
}

}  // namespace
}  // namespace fsdp::transport::tcp
