// SPDX-License-Identifier: Apache-2.0
// Tests how a channel handles a peer's bytes, over a transport that the test plays. A chunk has a place only if the
// current call waits for it.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "played_transport.h"

namespace fsdp::transport::test {
namespace {

// Makes an all_reduce of 1,000 numbers by two ranks. Each has a slice of 500, which is one chunk.
TEST(Channel, TakesOnlyWhatItsCallWaitsFor) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(0, 2, rank.waiter, rank.failure);
    PlayedTransport transport;
    Channel channel(transport, seat, {0, 1}, played_key, chunk_bytes, 0, rank.device.get(), "a channel");
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
    right.key = played_key;
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

// Rank 1 sends two chunks of one move and one of another; rank 2 sends nothing. Rank 0 sends to rank 2 alone.
void exchange_chunks(bool in_order) {
  const auto problems = run_threads(1, [&](Rank &rank) {
    auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
    PlayedTransport transport;
    transport.in_order = in_order;
    Channel channel(transport, seat, {0, 1, 2}, played_key, chunk_bytes, 0, nullptr, "a channel");
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
    Channel channel(transport, seat, {0, 1, 2}, played_key, chunk_bytes, 0, rank.device.get(), "a channel");
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
      ended.key = played_key;
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
    Channel channel(transport, seat, {0, 3, 5, 8}, played_key, chunk_bytes, 0, rank.device.get(), "a channel");
    Header question{};
    question.magic = messages::header_magic;
    question.kind = Kind::ask;
    question.key = played_key;
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
    Channel channel(transport, seat, {0, 1}, played_key, chunk_bytes, 0, rank.device.get(), "a channel");
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
    hello.key = played_key;
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

}  // namespace
}  // namespace fsdp::transport::test
