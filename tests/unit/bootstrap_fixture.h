// SPDX-License-Identifier: Apache-2.0
// Runs processes that meet to form a job, and hand-made ranks that send rank 0 correct or wrong messages.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <optional>

#include "denied_calls.h"
#include "membership/job.h"
#include "membership/join/guest.h"
#include "membership/join/rank_links.h"
#include "membership/wire/packet.h"
#include "reported_processes.h"
#include "transport/names.h"

namespace fsdp::transport::test {

using namespace std::chrono_literals;

// Makes hand-made ranks of the world that the options describe.
struct RanksByHand {
  WorldOptions options;

  Fd connect() const {
    const Address address(options);
    Fd socket;
    for (int tries = 0; tries < 500; ++tries) {
      socket = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      if (::connect(socket.get(), address.get(), address.length()) == 0) return socket;
      std::this_thread::sleep_for(10ms);
    }
    ADD_FAILURE() << "rank 0 does not listen";
    return socket;
  }
  // Returns the next message if it is of this kind.
  template <class Message>
  static std::optional<Message> hear(const Fd &socket) {
    await_readable(socket, 5000);
    const auto packet = receive_packet(socket);
    return packet ? packet->as<Message>() : std::nullopt;
  }
  // Answers the challenge with this secret, and returns the proof that rank 0 must send.
  Digest answer(const Fd &socket, const std::string &secret) const {
    const auto challenge = hear<wire::Challenge>(socket);
    if (!challenge) throw std::runtime_error("no challenge");
    auto answer = wire::make<wire::Answer>();
    answer.nonce = make_nonce();
    answer.digest = wire::guest_digest(secret, challenge->nonce, answer.nonce);
    send_packet(socket, &answer, sizeof answer);
    return wire::host_digest(secret, challenge->nonce, answer.nonce);
  }
  // Returns a connection that has proven the secret and may join.
  Fd meet() const {
    Fd socket = connect();
    const Digest expected = answer(socket, options.secret);
    const auto proof = hear<wire::Proof>(socket);
    if (!proof || !equal(proof->digest, expected)) throw std::runtime_error("rank 0 does not prove the secret");
    return socket;
  }
  void join(const Fd &socket, uint32_t rank, std::span<const int> files = {}) const {
    auto join = wire::make<wire::JoinPacket>();
    join.rank = rank;
    join.world_size = options.size;
    join.wire_version = wire_version;
    join.library.set(library_version);
    send_packet(socket, &join, sizeof join, files);
  }
  // Returns when rank 0 has admitted this rank. Before that a second process with this rank may be refused for another
  // reason, or not at all.
  void await_admission(uint32_t rank) const {
    for (;;) {
      const Fd socket = meet();
      join(socket, rank);
      const auto refusal = hear<wire::RefusedPacket>(socket);
      if (refusal && refusal->text.view().find("already") != std::string::npos) return;
      std::this_thread::sleep_for(1ms);
    }
  }
};

// Runs one rank in a child process, which writes down how its joining ended.
struct Outcome {
  std::atomic<int32_t> status, rank;
  std::atomic<int64_t> ended_ns;
  char text[512];
  char logged[1024];
};

class Bootstrap : public ReportedProcesses<Outcome>, protected RanksByHand {
 protected:
  void SetUp() override {
    ReportedProcesses::SetUp();
    options = {0, 3, unique_rendezvous(), "the secret", 10'000};
  }

  // denied is the number of a system call that the process's kernel denies.
  size_t start(WorldOptions world, std::optional<long> denied = {}) {
    return run([&](Outcome &report) {
      RankOptions rank_options;
      rank_options.timeout_ms = world.timeout_ms;
      Rank rank(rank_options);
      world.log = [&](fsdp_log_level, const std::string &line) { append(report.logged, line); };
      const Error error = error_of([&] {
        if (denied) deny_call(*denied);
        check_kernel(world, rank.waiter);
        rank.world = create_process_world(world, rank.waiter, rank.failure, *rank.device);
        rank.make_team();
        rank.leave();
      });
      const int64_t ended_ns = now_ns();
      report.status = error.status;
      report.rank = error.rank;
      std::strncpy(report.text, error.what(), sizeof report.text - 1);
      report.ended_ns = ended_ns;  // stored last, because a reader that waits for it then reads the others
    });
  }
  size_t start(uint32_t rank) {
    WorldOptions world = options;
    world.rank = rank;
    return start(world);
  }

  static int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  // Soon after that rank's death, all of these end with an error that names it.
  void expect_death(std::initializer_list<size_t> survivors, int32_t rank, int64_t died_ns) {
    for (const size_t index : survivors) {
      expect(index, FSDP_PEER_FAILED, fmt::format("rank {} died before the job had formed", rank));
      EXPECT_EQ(reports[index].rank, rank);
      EXPECT_LT(static_cast<double>(reports[index].ended_ns - died_ns) * 1e-9, patience_seconds);
    }
  }
};

}  // namespace fsdp::transport::test
