// SPDX-License-Identifier: Apache-2.0
// Runs processes that meet at a TCP rendezvous. Each only claims to be on a certain host.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>

#include "denied_calls.h"
#include "membership/job.h"
#include "membership/join/message.h"
#include "membership/join/rank_links.h"
#include "membership/join/rendezvous.h"
#include "membership/launch/meeting_point.h"
#include "membership/wire/frame_stream.h"
#include "membership/wire/handshake.h"
#include "membership/wire/packet.h"
#include "reported_processes.h"
#include "transport/names.h"

namespace fsdp::transport::test {

using namespace std::chrono_literals;

inline std::vector<std::byte> bytes_of(const std::string &text) {
  const auto *first = reinterpret_cast<const std::byte *>(text.data());
  return {first, first + text.size()};
}

// Tells how one rank's meeting ended.
struct MeetingReport {
  std::atomic<int32_t> status, rank, control_size, cards;
  std::atomic<bool> met;
  std::atomic<int64_t> ended_ns;
  uint32_t nodes[16];
  char text[512];
  char cards_seen[512];  // joined by spaces
  char description[512];
  char logged[1024];
};

class Rendezvous : public ReportedProcesses<MeetingReport> {
 protected:
  void SetUp() override {
    ReportedProcesses::SetUp();
    options.size = 3;
    options.secret = "the secret";
    options.timeout_ms = 20'000;
    at = free_place();
    options.rendezvous = "tcp://" + at.text();
  }
  static Endpoint free_place() {
    std::string problem;
    const Fd listener = listen_at(Endpoint::resolve("127.0.0.1", 0, problem).at(0), 1);
    return Endpoint::local(listener);
  }

  // denied is the number of a system call that the process's kernel denies.
  size_t start(const WorldOptions &world, std::optional<long> denied = {}) {
    return run([&](MeetingReport &report) { meet(world, report, pause, hold, denied); });
  }
  // The process has its own host, unless the test names one.
  size_t start(uint32_t rank, const std::string &host = {}) {
    WorldOptions world = options;
    world.rank = rank;
    world.host_id = host.empty() ? "host of " + std::to_string(rank) : host;
    return start(world);
  }
  std::vector<uint32_t> nodes(size_t index) const {
    return {reports[index].nodes, reports[index].nodes + options.size};
  }

  // Returns when that process has told rank 0 which rank it is, which it does before it makes its card. Rank 0 then
  // handles processes that connect later after it.
  void await_join(size_t index) const {
    for (int ms = 0; reports[index].cards == 0 && ms < 20'000; ++ms) std::this_thread::sleep_for(1ms);
    EXPECT_NE(reports[index].cards, 0) << "process " << index << " has not joined";
  }

  Limit limit(std::chrono::milliseconds time) const { return {std::chrono::steady_clock::now() + time, waiter}; }
  // Makes a stranger's connection, after rank 0 has begun to listen.
  Fd connect() const {
    std::string problem;
    for (int tries = 0; tries < 500; ++tries) {
      Fd socket = connect_to(at, limit(5s), problem);
      if (socket) return socket;
      std::this_thread::sleep_for(10ms);
    }
    ADD_FAILURE() << problem;
    return {};
  }
  // Makes a rank by hand that has proven the secret.
  FrameStream enter() const {
    Fd socket = connect();
    return prove_to(std::move(socket), Role::guest);
  }

  // Makes rank 0 by hand. Each process that connects has proven the secret.
  FrameStream let_in(Fd socket) const { return prove_to(std::move(socket), Role::host); }
  FrameStream prove_to(Fd socket, Role role) const {
    StreamKeys keys;
    EXPECT_EQ(prove(socket, role, options.secret, "rendezvous of job " + options.job, limit(5s), &keys), "");
    return FrameStream(std::move(socket), 1 << 20, keys);
  }

  // Its card has not come yet.
  void introduce(FrameStream &stream, uint32_t rank) const {
    stream.queue(message::share(message::Hello{wire_version, rank, library_version}));
    stream.queue(
        message::share(message::Join{rank, options.size, options.attempt, "far away " + std::to_string(rank), "far"}));
    EXPECT_TRUE(stream.flush());
  }
  void join(FrameStream &stream, uint32_t rank) const {
    introduce(stream, rank);
    stream.queue(message::share(message::Card{rank, bytes_of("by hand")}));
    EXPECT_TRUE(stream.flush());
  }
  // Returns rank 0's next message of this kind.
  template <class M>
  std::optional<M> hear(FrameStream &stream) const {
    while (const auto frame = stream.receive(limit(10s))) {
      const auto parsed = message::parse(frame->kind, frame->body);
      if (const auto *found = std::get_if<M>(&parsed.message)) return *found;
    }
    return {};
  }

  static int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  WorldOptions options;
  std::chrono::milliseconds pause{0};  // between the meeting and the descriptors of a host
  // This pause is between the meeting and its end, as in ranks that form a world.
  std::chrono::milliseconds hold{0};
  Endpoint at;
  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 10'000};

 private:
  static void meet(WorldOptions world, MeetingReport &report, std::chrono::milliseconds pause,
                   std::chrono::milliseconds hold, std::optional<long> denied) {
    world.log = [&](fsdp_log_level, const std::string &line) { append(report.logged, line); };
    Failure failure;
    const Waiter waiter(failure, nullptr, nullptr, world.timeout_ms);
    const auto make_card = [&](const std::string &address) {
      ++report.cards;
      return bytes_of("card-" + std::to_string(world.rank) + "@" + address);
    };
    const Error error = error_of([&] {
      if (denied) deny_call(*denied);
      check_kernel(world, waiter);
      const membership::Rendezvous meeting = meet_processes(world, waiter, make_card);
      note(meeting, report);
      report.met = true;
      std::this_thread::sleep_for(pause);
      exchange(world, meeting, waiter);
      for (const auto end = std::chrono::steady_clock::now() + hold; std::chrono::steady_clock::now() < end;) {
        waiter.poll();
        std::this_thread::sleep_for(5ms);
      }
      meeting.watch->finish();
    });
    const int64_t ended_ns = now_ns();
    report.status = error.status;
    report.rank = error.rank;
    std::strncpy(report.text, error.what(), sizeof report.text - 1);
    report.ended_ns = ended_ns;  // stored last, because a reader that waits for it then reads the others
  }
  static void note(const membership::Rendezvous &meeting, MeetingReport &report) {
    std::string cards;
    meeting.roster.for_each([&](const message::RosterEntry &entry, bool) {
      if (entry.rank < std::size(report.nodes)) report.nodes[entry.rank] = entry.node;
      cards +=
          (entry.rank ? " " : "") + std::string(reinterpret_cast<const char *>(entry.card.data()), entry.card.size());
    });
    std::strncpy(report.cards_seen, cards.c_str(), sizeof report.cards_seen - 1);
    std::strncpy(report.description, meeting.description.c_str(), sizeof report.description - 1);
    struct stat status;
    if (::fstat(meeting.control.get(), &status) == 0) report.control_size = static_cast<int32_t>(status.st_size);
  }
  // The ranks of a host reach each other by their ranks in the job. The lowest rank sends each a descriptor. It may
  // have died before, so a rank that waits for it asks the waiter, as ranks must that form a world.
  static void exchange(const WorldOptions &world, const membership::Rendezvous &meeting, const Waiter &waiter) {
    const auto ranks = meeting.roster.ranks_of(meeting.roster.nodes()[world.rank]);
    const auto deadline = std::chrono::steady_clock::now() + 5s;
    for (;;) {
      const auto file = meeting.links->meet({1, 0}, ranks, [] { return Fd(::dup(0)); });
      if (file) break;
      if (std::chrono::steady_clock::now() > deadline) fail(FSDP_TIMEOUT, "no descriptor came");
      waiter.poll();
      meeting.links->sleep(10);
    }
    meeting.links->find_dead([](uint32_t) {});
  }
};

}  // namespace fsdp::transport::test
