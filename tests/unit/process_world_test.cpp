// SPDX-License-Identifier: Apache-2.0
// Ranks as processes run the same collectives as threads, and ranks survive when others are killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <csignal>
#include <filesystem>
#include <random>

#include "bootstrap_fixture.h"
#include "shm_bodies.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

void expect_well(const std::vector<int> &codes) {
  for (size_t r = 0; r < codes.size(); ++r) EXPECT_EQ(codes[r], 0) << "rank " << r;
}

class ProcessSizes : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(ProcessWorld, ProcessSizes, testing::Values(1, 2, 3, 4, 8));

TEST_P(ProcessSizes, CollectivesOfProcessesHaveTheRightBytes) {
  expect_well(await_processes(start_processes(GetParam(), collectives_body)));
}
TEST_P(ProcessSizes, ExchangesOfProcessesHaveTheRightBytes) {
  expect_well(await_processes(start_processes(GetParam(), exchange_body)));
}
TEST_P(ProcessSizes, VersionsOfProcessesAreAwaited) {
  expect_well(await_processes(start_processes(GetParam(), versions_body)));
}

// The parent and its children share the time when the victim was killed, and the survivors' findings.
struct Witness {
  std::atomic<uint32_t> ready[16];
  std::atomic<int64_t> killed_ns;
  std::atomic<int32_t> status[16], rank[16];
  std::atomic<int64_t> seen_ns[16];
  char text[16][256];
};

class Kill : public testing::Test {
 protected:
  void SetUp() override {
    void *memory = ::mmap(nullptr, sizeof(Witness), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    witness = static_cast<Witness *>(memory);
  }
  void TearDown() override { ::munmap(witness, sizeof(Witness)); }

  static int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  // Survivors write down the error that their body ends with.
  Body witnessed(const Body &body) const {
    return [body, witness = witness](Rank &rank) {
      const uint32_t me = rank.rank();
      const Error error = error_of([&] { body(rank); });
      witness->seen_ns[me] = now_ns();
      witness->status[me] = error.status;
      witness->rank[me] = error.rank;
      std::strncpy(witness->text[me], error.what(), sizeof witness->text[me] - 1);
    };
  }

  void kill_and_check(const std::vector<pid_t> &processes, uint32_t victim) {
    witness->killed_ns = now_ns();
    ::kill(processes[victim], SIGKILL);
    const auto codes = await_processes(processes);
    double slowest = 0;
    for (uint32_t r = 0; r < processes.size(); ++r) {
      if (r == victim) continue;
      EXPECT_EQ(codes[r], 0) << "rank " << r;
      EXPECT_EQ(witness->status[r], FSDP_PEER_FAILED) << "rank " << r << ": " << witness->text[r];
      EXPECT_EQ(witness->rank[r], static_cast<int32_t>(victim)) << "rank " << r << ": " << witness->text[r];
      slowest = std::max(slowest, static_cast<double>(witness->seen_ns[r] - witness->killed_ns) * 1e-9);
    }
    EXPECT_LT(slowest, patience_seconds);
    std::printf("death of rank %u of %zu seen by all after %.0f ms: %s\n", victim, processes.size(), slowest * 1e3,
                witness->text[victim ? 0 : 1]);
  }

  void await_ready(uint32_t size) {
    for (uint32_t r = 0; r < size; ++r)
      while (!witness->ready[r]) std::this_thread::sleep_for(1ms);
  }

  Witness *witness = nullptr;
};

// The victim is killed during any of its work after the meeting: arenas, communicators, collectives.
TEST_F(Kill, ARankKilledAtAnyMomentIsNamed) {
  std::minstd_rand random(7);
  for (int i = 0; i < 24; ++i) {
    std::memset(static_cast<void *>(witness), 0, sizeof(Witness));
    const uint32_t size = 2 + static_cast<uint32_t>(i) % 3, victim = static_cast<uint32_t>(random()) % size;
    const auto processes = start_processes(size, witnessed([this](Rank &rank) {
                                             witness->ready[rank.rank()] = 1;
                                             for (;;) {
                                               Bench bench(rank);
                                               for (uint64_t seed = 0; seed < 5; ++seed) check_everything(bench, seed);
                                             }
                                           }));
    await_ready(size);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    kill_and_check(processes, victim);
  }
}

TEST_F(Kill, WhilePeersWaitOnTheCallersThread) {
  const auto processes =
      start_processes(3, witnessed([this](Rank &rank) {
                        auto versions = rank.team->create_versions("weights");
                        rank.meet();
                        witness->ready[rank.rank()] = 1;
                        if (rank.rank() == 1) std::this_thread::sleep_for(60s);
                        versions->await(1, rank.device->calling_thread(), "version 1 of the weights");
                      }));
  await_ready(3);
  kill_and_check(processes, 1);
  EXPECT_STREQ(witness->text[0], witness->text[2]);
  EXPECT_STREQ(witness->text[0], "version 1 of the weights: rank 1 died");
}

// No rank waits when the victim dies. The next wait finds the death.
TEST_F(Kill, WhileNoRankWaits) {
  const auto processes = start_processes(2, witnessed([this](Rank &rank) {
                                           rank.meet();
                                           witness->ready[rank.rank()] = 1;
                                           if (rank.rank() == 1) std::this_thread::sleep_for(60s);
                                           while (!witness->killed_ns) std::this_thread::sleep_for(1ms);
                                           std::this_thread::sleep_for(100ms);
                                           rank.meet();
                                         }));
  await_ready(2);
  kill_and_check(processes, 1);
}

// A rank may end when it has done its part. This is no failure for ranks that need nothing more from it.
TEST_F(Kill, ARankThatDidItsPartMayEnd) {
  const auto processes = start_processes(2, witnessed([this](Rank &rank) {
                                           auto versions = rank.team->create_versions("weights");
                                           versions->publish(1, rank.device->calling_thread());
                                           if (rank.rank() == 1) ::_exit(0);
                                           std::this_thread::sleep_for(200ms);
                                           versions->await(1, rank.device->calling_thread(), "version 1");
                                         }));
  expect_well(await_processes(processes));
  EXPECT_EQ(witness->status[0], FSDP_OK) << witness->text[0];
}

TEST_F(Kill, DuringTheMeeting) {
  const std::string rendezvous = unique_rendezvous();
  const RanksByHand by_hand{{0, 3, rendezvous, "", 20'000}};
  const auto act = [&](uint32_t r) {
    const pid_t process = ::fork();
    if (process != 0) return process;
    Rank rank;
    WorldOptions world = by_hand.options;
    world.rank = r;
    const Error error =
        error_of([&] { rank.world = create_process_world(world, rank.waiter, rank.failure, *rank.device); });
    witness->status[r] = error.status;
    witness->rank[r] = error.rank;
    witness->seen_ns[r] = now_ns();
    std::strncpy(witness->text[r], error.what(), sizeof witness->text[r] - 1);
    ::_exit(0);
  };
  for (const uint32_t victim : {1, 0}) {
    std::vector<pid_t> processes = {act(0), act(1)};
    by_hand.await_admission(1);  // rank 2 never comes
    kill_and_check(processes, victim);
    EXPECT_STREQ(witness->text[1 - victim],
                 victim ? "rank 1 died before the job had formed"
                        : fmt::format("rendezvous '{}': rank 0 ended before the job had formed", rendezvous).c_str());
  }
}

// The same process joins one job after another, as a program that survives failures does.
TEST(ProcessWorld, GivesEverythingBack) {
  const std::string rendezvous = unique_rendezvous();
  const auto act = [&](uint32_t r) {
    const pid_t process = ::fork();
    if (process != 0) return process;
    const auto live = [&](const std::function<void(Rank &)> &body) {
      Rank rank;
      rank.world = create_process_world({r, 2, rendezvous, "", 20'000}, rank.waiter, rank.failure, *rank.device);
      rank.make_team();
      body(rank);
      rank.team.reset();
    };
    int code = 0;
    try {
      live(collectives_body);
      const Holdings before = Holdings::without_threads();
      for (int i = 0; i < 3; ++i) {
        live(collectives_body);
        live([](Rank &rank) {  // a job that fails
          Bench bench(rank);
          if (rank.rank() == 1) return rank.world->abort("test");
          const Error error = error_of([&] { rank.meet(); });
          require(error.status == FSDP_PEER_FAILED && error.rank == 1, error.message);
        });
      }
      const Holdings after = Holdings::await(before);
      require(before.mappings == 0 && after.text() == before.text(), before.text() + " became " + after.text());
    } catch (const std::exception &error) {
      std::fprintf(stderr, "rank %u: %s\n", r, error.what());
      code = 1;
    }
    ::_exit(code);
  };
  expect_well(await_processes({act(0), act(1)}));
}

TEST(ProcessWorld, DescriptorsAndMemoryAreNotInherited) {
  expect_well(await_processes(start_processes(2, [](Rank &rank) {
    {
      Bench bench(rank);
      const pid_t child = ::fork();
      if (child == 0) ::_exit(Holdings().mappings == 0 ? 0 : 1);
      require(await_processes({child})[0] == 0, "a forked child has the arenas");
      for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        const int file = std::stoi(entry.path().filename());
        std::error_code code;
        const std::string target = std::filesystem::read_symlink(entry.path(), code);
        if (target.find("socket") == std::string::npos && target.find("memfd") == std::string::npos &&
            target.find("pidfd") == std::string::npos)
          continue;
        require(::fcntl(file, F_GETFD) & FD_CLOEXEC, "not close-on-exec: " + target);
      }
    }
    rank.leave();
  })));
}

TEST(ProcessWorld, TeamsWithoutRankZero) {
  expect_well(await_processes(start_processes(4, [](Rank &rank) {
    if (rank.rank() > 0) {
      rank.team = rank.world->create_team(std::vector<uint32_t>{3, 1, 2}, "three");
      Stripes stripes(rank, 4096, "arena of three");
      rank.meet();
    }
    rank.make_team();
    rank.leave();
  })));
}

}  // namespace
}  // namespace fsdp::transport::test
