// SPDX-License-Identifier: Apache-2.0
// Tests how a channel handles a peer's bytes, over a transport that the test plays. A chunk has a place only if the
// current call waits for it.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "net_ranks.h"
#include "transport/call/launch.h"
#include "transport/message/channel/channel.h"

namespace fsdp::transport::test {
namespace {

using messages::Channel;
using messages::Header;
using messages::Kind;
using messages::PeerLoss;
using messages::Place;
using messages::Receiver;
using messages::Stage;

constexpr uint64_t key = 7, chunk_bytes = 61440;

// The transport of rank 0. It records sent data, and treats it as sent at once.
class PlayedTransport final : public messages::Transport {
 public:
  PlayedTransport() : Transport(0) {}
  messages::TransportTraits traits() const noexcept override { return {in_order, true, true}; }
  std::vector<std::byte> address() const override { return {}; }
  const std::string &warnings() const noexcept override { return none_; }
  void join(NetJob, std::shared_ptr<Seat>) override {}
  bool connected(uint32_t) const noexcept override { return true; }
  void greet(uint32_t) override {}
  void send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) override {
    if (header.kind == Kind::answer) answers.emplace_back(to, header.chunk);
    calls.fetch_add(header.kind == Kind::call);
    if (header.kind == Kind::ended && bytes == sizeof told) std::memcpy(&told, payload, bytes);
  }
  void prepare(uint32_t) override {
    if (keeps_data && under_way > 0) throw std::bad_alloc();
  }
  void send_data(uint32_t to, const Header &header, const void *data) override {
    sent.push_back({to, header.bytes, data});
    kinds.push_back(header.kind);
    ++under_way;
    if (keeps_data) return;
    --under_way;
    receiver().sent(Kind::data, to);
  }
  const PeerLoss &loss_of(uint32_t) const noexcept override { return well_; }
  void cut(uint32_t to) noexcept override {
    for (; under_way > 0; --under_way) receiver().sent(Kind::data, to);
  }
  void wake() noexcept override {}
  Receiver &receiver() { return *receivers_.find(key); }

  std::atomic<int> calls{0};
  std::vector<std::pair<uint32_t, uint64_t>> answers;  // ranks that were answered, with the number of the question
  messages::Ended told{};                              // the latest report of the end of this rank
  struct Sent {
    uint32_t to;
    uint64_t bytes;
    const void *data;
    bool operator==(const Sent &) const = default;
  };
  std::vector<Sent> sent;
  std::vector<Kind> kinds;  // of what was sent
  bool in_order = true;
  bool keeps_data = false;  // keeps data until it is cut, with memory for one message only
  int under_way = 0;

 private:
  std::string none_;
  PeerLoss well_;
};

// Makes an all_reduce of 1,000 numbers by two ranks. Each has a slice of 500, which is one chunk.
TEST(Channel, TakesOnlyWhatItsCallWaitsFor) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 2, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1}, key, chunk_bytes, 0, rank.device.get(), "a channel");
    std::vector<float> values(1000, 1.0F);
    const Sum span = everywhere_in_place(values.data(), values.size());
    Launch launch;
    launch.start(Operation::all_reduce, {1, "sum"});
    launch.add(std::span(&span, 1), false);
    launch.round = channel.round().number();
    launch.number = channel.round().enqueue();
    bool well = false;
    std::thread call([&] {
      try {
        well = channel.run(launch, false);
      } catch (const Error &) {
        // The test itself reports what it has found.
      }
    });
    while (transport.calls.load() == 0) std::this_thread::yield();

    Header right{};
    right.magic = messages::header_magic;
    right.from = 1;
    right.key = key;
    right.round = launch.round;
    right.number = launch.number;
    right.call = launch.fingerprint.hash;
    Header hello = right, data = right;
    hello.kind = Kind::call;
    hello.chunk = chunk_bytes;
    hello.bytes = sizeof launch.fingerprint;
    data.kind = Kind::data;
    data.stage = Stage::reduce;
    data.bytes = 2000;

    auto lock = transport.lock();
    Receiver &receiver = transport.receiver();
    receiver.control(hello, &launch.fingerprint, sizeof launch.fingerprint);
    receiver.move_on();
    const auto place_of = [&](auto change) {
      Header changed = data;
      change(changed);
      return receiver.place(changed, changed.bytes);
    };
    const std::pair<const char *, void (*)(Header &)> misfits[] = {
        {"of another call", [](Header &header) { ++header.call; }},
        {"of a rank that is none", [](Header &header) { header.from = 5; }},
        {"of this rank itself", [](Header &header) { header.from = 0; }},
        {"of a chunk that the call does not have", [](Header &header) { header.chunk = 1; }},
        {"of a chunk 2^63", [](Header &header) { header.chunk = uint64_t{1} << 63; }},
        {"shorter", [](Header &header) { header.bytes -= 4; }},
        {"longer", [](Header &header) { header.bytes += 4; }},
        {"of a stage that is none", [](Header &header) { header.stage = Stage{7}; }},
    };
    std::string problem;
    for (const auto &[what, change] : misfits) {
      const Place place = place_of(change);
      if (place.to || !place.misfit) problem += std::string(" a chunk ") + what + " is taken;";
    }
    // Chunks of calls that were discarded, or have not begun here, are dropped. The peer is not blamed for them.
    for (void (*change)(Header &) :
         {+[](Header &header) { ++header.number; }, +[](Header &header) { ++header.round; }}) {
      const Place place = place_of(change);
      if (place.to || place.misfit) problem += " a chunk of another round is not dropped;";
    }
    for (const Stage stage : {Stage::reduce, Stage::gather}) {
      data.stage = stage;
      const Place place = receiver.place(data, data.bytes);
      if (!place.to) {
        problem += " the right chunk has no place;";
        continue;
      }
      const std::vector<float> theirs(500, stage == Stage::reduce ? 2.0F : 40.0F);
      std::memcpy(place.to, theirs.data(), 2000);
      receiver.arrived(data);
      if (const Place twice = receiver.place(data, data.bytes); twice.to || !twice.misfit)
        problem += " a chunk is taken twice;";
    }
    receiver.move_on();
    lock.unlock();
    if (!problem.empty()) rank.failure.set(Error(FSDP_ABORTED, problem));  // the call would wait for ever
    call.join();
    require(problem.empty(), problem);
    require(well, "the call was given up");
    require(
        values ==
            [] {
              std::vector<float> wanted(1000, 40.0F);
              std::fill(wanted.begin(), wanted.begin() + 500, 3.0F);
              return wanted;
            }(),
        "the sums");
  });
  EXPECT_EQ(problems[0], "");
}

Header header_of(const Launch &launch, Kind kind, uint32_t from, uint64_t bytes) {
  Header header{};
  header.magic = messages::header_magic;
  header.kind = kind;
  header.from = from;
  header.key = key;
  header.round = launch.round;
  header.number = launch.number;
  header.call = launch.fingerprint.hash;
  header.bytes = bytes;
  return header;
}

// Rank 1 sends two chunks of one move and one of another; rank 2 sends nothing. Rank 0 sends to rank 2 alone.
void exchange_chunks(bool in_order) {
  const auto problems = run_threads(1, [&](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    transport.in_order = in_order;
    Channel channel(transport, seat, {0, 1, 2}, key, chunk_bytes, 0, nullptr, "a channel");
    std::vector<std::byte> from(chunk_bytes + 200, std::byte{3}), to(2 * chunk_bytes, std::byte{77});
    const std::vector<Move> moves = {
        {0, 2, 10, chunk_bytes + 8, nullptr},        {1, 0, 0, chunk_bytes + 50, to.data()},
        {0, 0, 0, 5, to.data() + chunk_bytes + 100}, {2, 1, 0, 99, nullptr},
        {1, 0, 7, 30, to.data() + chunk_bytes + 51}, {0, 2, 3, 40, nullptr}};
    Launch launch;
    launch.start(Operation::exchange, {1, "moved"});
    launch.add(Part::alone(from.data()), moves, 0, 3);
    launch.round = channel.round().number();
    launch.number = channel.round().enqueue();
    bool well = false;
    std::thread call([&] {
      try {
        well = channel.run(launch, false);
      } catch (const Error &) {
        // The test itself reports what it has found.
      }
    });
    while (transport.calls.load() < 2) std::this_thread::yield();

    auto lock = transport.lock();
    Receiver &receiver = transport.receiver();
    for (const uint32_t r : {1, 2}) {
      Header hello = header_of(launch, Kind::call, r, sizeof launch.fingerprint);
      hello.chunk = chunk_bytes;
      receiver.control(hello, &launch.fingerprint, sizeof launch.fingerprint);
    }
    receiver.move_on();
    std::string problem;
    const auto require_misfit = [&](const char *what, uint32_t source, uint64_t chunk, uint64_t bytes, Stage stage) {
      Header data = header_of(launch, Kind::data, source, bytes);
      data.chunk = chunk;
      data.stage = stage;
      const Place place = receiver.place(data, bytes);
      if (place.to || !place.misfit) problem += std::string(" a chunk ") + what + " is taken;";
    };
    require_misfit("of a rank that sends nothing", 2, 0, 99, Stage::gather);
    require_misfit("behind the last one", 1, 3, chunk_bytes, Stage::gather);
    require_misfit("2^63", 1, uint64_t{1} << 63, chunk_bytes, Stage::gather);
    require_misfit("of a sum", 1, 0, chunk_bytes, Stage::reduce);
    const uint64_t sizes[] = {chunk_bytes, 50, 30};
    for (uint64_t chunk = 0; chunk < 3; ++chunk) {
      if (in_order) require_misfit("out of order", 1, chunk + 1, sizes[(chunk + 1) % 3], Stage::gather);
      require_misfit("that is longer", 1, chunk, sizes[chunk] + 1, Stage::gather);
      require_misfit("that is shorter", 1, chunk, sizes[chunk] - 1, Stage::gather);
      Header data = header_of(launch, Kind::data, 1, sizes[chunk]);
      data.chunk = chunk;
      data.stage = Stage::gather;
      const Place place = receiver.place(data, sizes[chunk]);
      if (!place.to) {
        problem += " the right chunk has no place;";
        break;
      }
      std::memset(place.to, static_cast<int>(chunk + 1), sizes[chunk]);
      receiver.arrived(data);
      if (in_order) require_misfit("that has come", 1, chunk, sizes[chunk], Stage::gather);
    }
    require_misfit("behind the last one", 1, 3, 30, Stage::gather);
    receiver.move_on();
    lock.unlock();
    if (!problem.empty()) rank.failure.set(Error(FSDP_ABORTED, problem));  // the call would wait for ever
    call.join();
    require(problem.empty(), problem);
    require(well, "the call was given up");
    std::vector<std::byte> wanted(2 * chunk_bytes, std::byte{77});
    const auto fill = [&](uint64_t begin, uint64_t bytes, int value) { std::memset(&wanted[begin], value, bytes); };
    fill(0, chunk_bytes, 1);
    fill(chunk_bytes, 50, 2);
    fill(chunk_bytes + 51, 30, 3);
    fill(chunk_bytes + 100, 5, 3);
    require(to == wanted, "what was moved here");
    const std::vector<PlayedTransport::Sent> sent = {
        {2, chunk_bytes, &from[10]}, {2, 8, &from[10 + chunk_bytes]}, {2, 40, &from[3]}};
    require(transport.sent == sent, fmt::format("{} chunks are sent, or others", transport.sent.size()));
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Channel, AnExchangeTakesAndSendsOnlyChunksOfItsMoves) { exchange_chunks(true); }

TEST(Channel, AnExchangeTakesOnlyItsChunksInAnyOrder) { exchange_chunks(false); }

// The peer arrived first, so data leaves as soon as the call begins. When the call throws, no thread may still read
// memory that the caller then frees. Rank 2 discards, so rank 1, which had enqueued all, gives up. Rank 2 passes on
// that rank 1 had enqueued all, and this message comes last.
TEST(Channel, ErrorNamesFirstRankToDiscard) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, key, chunk_bytes, 0, rank.device.get(), "a channel");
    const uint64_t round = channel.round().number();
    const auto end = [&](uint64_t flags, uint64_t blamed) {
      return messages::EndState{first_phase(round) + parts, round << 32 | blamed << 8 | flags, first_phase(round)};
    };
    const auto tell = [&](uint32_t from, const messages::EndState &own, const messages::EndState &of_cause,
                          uint64_t cause) {
      Header ended{};
      ended.magic = messages::header_magic;
      ended.kind = Kind::ended;
      ended.from = from;
      ended.key = key;
      const messages::Ended payload{own, cause, of_cause};
      const auto lock = transport.lock();
      transport.receiver().control(ended, &payload, sizeof payload);
    };
    const auto first = end(RoundState::abandoned, 2), enqueued_all = end(RoundState::enqueued_all, 1),
               follower = end(RoundState::enqueued_all | RoundState::abandoned, 2);
    tell(1, follower, first, 2);
    tell(2, first, enqueued_all, 1);

    std::vector<float> values(1000, 1.0F);
    const Sum span = everywhere_in_place(values.data(), values.size());
    Launch launch;
    launch.start(Operation::all_reduce, {1, "sum"});
    launch.add(std::span(&span, 1), false);
    launch.round = round;
    launch.number = channel.round().enqueue();
    require(!channel.run(launch, false), "a call of a discarded round is given up");
    const auto broken = channel.round().broken();
    require(broken && broken->rank == 2, broken ? broken->message : "not broken");
    require(transport.told.cause == 2, fmt::format("rank {} is told as the cause", transport.told.cause));
    channel.round().abandon();
    channel.tell_end();
    require(transport.told.cause == 2, fmt::format("rank {} is told as the cause", transport.told.cause));
    require(RoundState::blamed(transport.told.own.flags) == 2, "whom a rank blames is not what it does later");
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Channel, AQuestionIsAnsweredOnceToTheRankThatAsked) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 9, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 3, 5, 8}, key, chunk_bytes, 0, rank.device.get(), "a channel");
    Header question{};
    question.magic = messages::header_magic;
    question.kind = Kind::ask;
    question.key = key;
    const auto lock = transport.lock();
    for (const auto &[from, asked] : {std::pair(8u, 1001u), std::pair(3u, 1002u)}) {
      question.from = from, question.chunk = asked;
      transport.receiver().control(question, nullptr, 0);
    }
    for (int i = 0; i < 2; ++i) transport.receiver().move_on();
    const std::vector<std::pair<uint32_t, uint64_t>> wanted = {{3, 1002}, {8, 1001}};
    require(transport.answers == wanted, fmt::format("{} answers, or others", transport.answers.size()));
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Channel, ACallThatFailsAsItBeginsLeavesNothingUnderWay) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 2, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1}, key, chunk_bytes, 0, rank.device.get(), "a channel");
    std::vector<float> values(100'000, 1.0F);
    const Sum span = everywhere_in_place(values.data(), values.size());
    Launch launch;
    launch.start(Operation::all_reduce, {1, "sum"});
    launch.add(std::span(&span, 1), false);
    launch.round = channel.round().number();
    launch.number = channel.round().enqueue();
    Header hello{};
    hello.magic = messages::header_magic;
    hello.kind = Kind::call;
    hello.from = 1;
    hello.key = key;
    hello.round = launch.round;
    hello.number = launch.number;
    hello.call = launch.fingerprint.hash;
    hello.chunk = chunk_bytes;
    hello.bytes = sizeof launch.fingerprint;
    {
      const auto lock = transport.lock();
      transport.receiver().control(hello, &launch.fingerprint, sizeof launch.fingerprint);
    }
    transport.keeps_data = true;
    bool starved = false;
    try {
      channel.run(launch, false);
    } catch (const std::bad_alloc &) {
      starved = true;
    }
    const int left = std::exchange(transport.under_way, 0);
    for (int i = 0; i < left; ++i) transport.receiver().sent(Kind::data, 1);
    require(starved, "it did not fail");
    require(left == 0, fmt::format("{} messages of the call's memory are under way", left));
  });
  EXPECT_EQ(problems[0], "");
}

// ---- short calls ----

// An all_reduce of 100 numbers by three ranks, which is short. Rank 0 has the channel.
struct ShortSum {
  ShortSum(Rank &rank, Channel &channel) : rank(rank), channel(channel) {}
  void start(std::vector<float> mine) {
    values = std::move(mine);
    const Sum span = everywhere_in_place(values.data(), values.size());
    launch.pieces.clear();
    launch.start(Operation::all_reduce, {1, "sum"});
    launch.add(std::span(&span, 1), false);
    launch.round = channel.round().number();
    launch.number = channel.round().enqueue();
    call = std::thread([this] {
      try {
        well = channel.run(launch, false);
      } catch (const Error &) {
        // The test itself reports what it has found.
      }
    });
  }
  // The message of a peer whose numbers are all `value`, for the call that comes `later` calls after this one.
  Header header(uint32_t from, uint64_t later, Kind kind = Kind::call) const {
    Header header = header_of(launch, kind, from, sizeof launch.fingerprint + 100 * sizeof(float));
    header.stage = Stage::whole;
    header.chunk = kind == Kind::call ? chunk_bytes : 0;
    header.number += later;
    return header;
  }
  bool give(Receiver &receiver, const Header &header, float value) const {
    const Place place = receiver.place(header, header.bytes);
    if (!place.to) return false;
    const std::vector<float> theirs(100, value);
    std::memcpy(place.to, &launch.fingerprint, sizeof launch.fingerprint);
    std::memcpy(place.to + sizeof launch.fingerprint, theirs.data(), theirs.size() * sizeof(float));
    receiver.arrived(header);
    receiver.move_on();
    return true;
  }
  void finish(const std::string &problem, float wanted) {
    if (!problem.empty()) rank.failure.set(Error(FSDP_ABORTED, problem));  // the call would wait for ever
    call.join();
    require(problem.empty(), problem);
    require(well, "the call was given up");
    require(values == std::vector<float>(100, wanted), fmt::format("the sum is {}, not {}", values[0], wanted));
  }

  Rank &rank;
  Channel &channel;
  Launch launch;
  std::vector<float> values;
  std::thread call;
  bool well = false;
};

constexpr uint64_t short_bytes = 1024;

// A peer whose channel is not known to exist gets the call first, and the data once it has come.
TEST(Channel, AShortCallSendsEachPeerOneMessageWithItsData) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
    ShortSum sum(rank, channel);
    sum.start(std::vector<float>(100, 1.0F));
    while (transport.calls.load() < 2) std::this_thread::yield();
    std::string problem;
    {
      const auto lock = transport.lock();
      Receiver &receiver = transport.receiver();
      if (!transport.sent.empty()) problem += " data goes to a peer whose channel may not exist;";
      for (const uint32_t r : {1, 2}) {
        Header hello = header_of(sum.launch, Kind::call, r, sizeof sum.launch.fingerprint);
        hello.chunk = chunk_bytes;
        receiver.control(hello, &sum.launch.fingerprint, sizeof sum.launch.fingerprint);
        receiver.move_on();
        if (!sum.give(receiver, sum.header(r, 0, Kind::data), 10.0F * static_cast<float>(r)))
          problem += " the data has no place;";
      }
      if (transport.kinds != std::vector{Kind::data, Kind::data}) problem += " the data was not sent once to each;";
    }
    sum.finish(problem, 31.0F);

    transport.kinds.clear();
    transport.calls = 0;
    {
      const auto lock = transport.lock();
      for (const uint32_t r : {1, 2})  // both peers come first
        if (!sum.give(transport.receiver(), sum.header(r, 1), 2.0F)) problem += " a message that comes early is lost;";
    }
    sum.start(std::vector<float>(100, 5.0F));
    sum.finish(problem, 9.0F);
    require(transport.kinds == std::vector{Kind::call, Kind::call} && transport.calls == 0,
            fmt::format("{} messages with data, {} without", transport.kinds.size(), transport.calls.load()));
    require(transport.sent.back().bytes == sizeof(Fingerprint) + 400, "the length of a message");
  });
  EXPECT_EQ(problems[0], "");
}

// Rank 1 has come, rank 2 has not. Rank 1 is ahead, then ends the round and begins the next one.
TEST(Channel, WhatPeersSendAheadLeavesTheRunningShortCallAlone) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
    ShortSum sum(rank, channel);
    sum.start(std::vector<float>(100, 1.0F));
    while (transport.calls.load() < 2) std::this_thread::yield();
    std::string problem;
    {
      const auto lock = transport.lock();
      Receiver &receiver = transport.receiver();
      if (!sum.give(receiver, sum.header(1, 0), 10.0F)) problem += " the message of this call has no place;";
      if (!sum.give(receiver, sum.header(1, 1), 77.0F)) problem += " the message of the next call has no place;";
      Header next = sum.header(1, 0);
      ++next.round;
      if (!sum.give(receiver, next, 78.0F)) problem += " the message of the next round has no place;";
      if (!sum.give(receiver, sum.header(2, 0), 20.0F)) problem += " the last message has no place;";
    }
    sum.finish(problem, 31.0F);
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Channel, AShortCallTakesOnlyMessagesThatFit) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
    ShortSum sum(rank, channel);
    sum.start(std::vector<float>(100, 1.0F));
    while (transport.calls.load() < 2) std::this_thread::yield();
    std::string problem;
    {
      const auto lock = transport.lock();
      Receiver &receiver = transport.receiver();
      const std::pair<const char *, void (*)(Header &)> misfits[] = {
          {"of a rank that is none", [](Header &header) { header.from = 5; }},
          {"of this rank itself", [](Header &header) { header.from = 0; }},
          {"without data", [](Header &header) { header.bytes = sizeof(Fingerprint); }},
          {"that is longer than a short call", [](Header &header) { header.bytes = sizeof(Fingerprint) + 1025; }},
          {"of 2^63 bytes", [](Header &header) { header.bytes = uint64_t{1} << 63; }},
      };
      for (const auto &[what, change] : misfits) {
        Header changed = sum.header(1, 0);
        change(changed);
        const Place place = receiver.place(changed, changed.bytes);
        if (place.to || !place.misfit) problem += std::string(" a message ") + what + " is taken;";
      }
      // It is lost on the way, and comes again over another connection.
      if (!receiver.place(sum.header(1, 0), sum.header(1, 0).bytes).to) problem += " the message has no place;";
      receiver.lost(sum.header(1, 0));
      for (const uint32_t r : {1, 2})
        if (!sum.give(receiver, sum.header(r, 0), 10.0F)) problem += " the message has no place;";
      if (const Place twice = receiver.place(sum.header(1, 0), 488); twice.to || !twice.misfit)
        problem += " a message is taken twice;";
    }
    sum.finish(problem, 21.0F);
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Channel, AnEarlyMessageOfAnotherCallIsAMismatch) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
    ShortSum sum(rank, channel);
    sum.launch.start(Operation::all_reduce, {2, "another sum"});
    sum.launch.round = channel.round().number();
    {
      const auto lock = transport.lock();
      require(sum.give(transport.receiver(), sum.header(1, 0), 10.0F), "the early message has no place");
    }
    sum.start(std::vector<float>(100, 1.0F));
    sum.call.join();
    require(!sum.well && sum.values[0] == 1.0F, "a message of another call is summed");
    const auto failed = rank.failure.get();
    require(failed && failed->message.find("another sum") != std::string::npos,
            failed ? failed->message : "no failure");
  });
  EXPECT_EQ(problems[0], "");
}

}  // namespace
}  // namespace fsdp::transport::test
