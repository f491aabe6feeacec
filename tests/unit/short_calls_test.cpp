// SPDX-License-Identifier: Apache-2.0
// Tests how a channel makes short calls, over a transport that the test plays.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "played_transport.h"

namespace fsdp::transport::test {
namespace {

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
  // The header of a peer's message, for the call that comes `later` calls after this one.
  Header header(uint32_t from, uint64_t later, Kind kind = Kind::call) const {
    Header header = header_of(launch, kind, from, sizeof launch.fingerprint + 100 * sizeof(float));
    header.stage = Stage::whole;
    header.chunk = kind == Kind::call ? chunk_bytes : 0;
    header.number += later;
    return header;
  }
  // Passes the channel a message whose numbers are all `value`. Returns false if it has no place.
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

// A peer that may not have created its channel gets the call first, and the data after its own call has come.
TEST(Channel, AShortCallSendsEachPeerOneMessageWithItsData) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, played_key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
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

// Rank 1 has made the call, rank 2 has not. Rank 1 is ahead, then ends the round and begins the next one.
TEST(Channel, WhatPeersSendAheadLeavesTheRunningShortCallAlone) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1, 2}, played_key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
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
    Channel channel(transport, seat, {0, 1, 2}, played_key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
    ShortSum sum(rank, channel);
    sum.start(std::vector<float>(100, 1.0F));
    while (transport.calls.load() < 2) std::this_thread::yield();
    std::string problem;
    {
      const auto lock = transport.lock();
      Receiver &receiver = transport.receiver();
      const std::pair<const char *, void (*)(Header &)> misfits[] = {
          {"of a rank that does not exist", [](Header &header) { header.from = 5; }},
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
      if (const Place twice = receiver.place(sum.header(1, 0), sum.header(1, 0).bytes); twice.to || !twice.misfit)
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
    Channel channel(transport, seat, {0, 1, 2}, played_key, chunk_bytes, short_bytes, rank.device.get(), "a channel");
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

// Rank 1 is ahead. Its message arrives in the channel's memory while the channel ends, or stays away for ever.
void end_while_a_message_arrives(bool comes) {
  const auto problems = run_threads(1, [&](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    auto channel = std::make_unique<Channel>(transport, seat, std::vector<uint32_t>{0, 1, 2}, played_key, chunk_bytes,
                                             short_bytes, rank.device.get(), "a channel");
    ShortSum sum(rank, *channel);
    sum.launch.start(Operation::all_reduce, {1, "sum"});
    const Header header = sum.header(1, 0);
    Place place;
    {
      const auto lock = transport.lock();
      place = transport.receiver().place(header, header.bytes);
      if (!comes) transport.arriving = header;
    }
    require(place.to, "the message has no place");
    std::atomic<bool> ended{false};
    std::thread end([&] {
      channel.reset();
      ended = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const bool early = ended;
    if (comes && !early) {
      const auto lock = transport.lock();
      std::memset(place.to, 1, header.bytes);
      transport.receiver().arrived(header);
      transport.receiver().move_on();
    }
    end.join();
    require(!early, "the channel ends while a message arrives in its memory");
    require(!transport.has_receiver(), "messages still arrive for a channel that has ended");
    require(transport.cuts == (comes ? std::vector<uint32_t>{} : std::vector<uint32_t>{1}), "other peers are cut");
  });
  EXPECT_EQ(problems[0], "");
}

TEST(Channel, EndsWhenAMessageHasArrived) { end_while_a_message_arrives(true); }

TEST(Channel, CutsThePeerWhoseMessageStaysAway) { end_while_a_message_arrives(false); }

}  // namespace
}  // namespace fsdp::transport::test
