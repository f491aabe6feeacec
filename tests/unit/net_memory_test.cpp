// SPDX-License-Identifier: Apache-2.0
// Allocation fails on the thread that moves messages. The context fails, and the process goes on.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "membership/wire/endpoint.h"
#include "net_ranks.h"
#include "transport/message/tcp/link.h"
#include "transport/names.h"

namespace {

std::atomic<bool> starving{false};
std::atomic<size_t> starving_size{0};  // if not 0, allocations of this size fail, in every thread

bool starves(size_t bytes) {
  char name[16] = {};
  if (bytes != 0 && bytes == starving_size.load()) return true;
  return starving.load() && ::pthread_getname_np(::pthread_self(), name, sizeof name) == 0 &&
         (std::strcmp(name, "fsdp-ucx") == 0 || std::strcmp(name, "fsdp-tcp") == 0);
}

}  // namespace

#if defined(__GNUC__) && !defined(__clang__)
// GCC sees free() where it inlines the operator below, and mistakes the operator above for the library's.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

void *operator new(size_t bytes) {
  void *memory = starves(bytes) ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace fsdp::transport::test {
namespace {

// Rank 1's thread must keep a message for a communicator that it does not have yet.
TEST(NetMemory, NoneFailsTheContext) {
  RankOptions options;
  options.timeout_ms = 3'000;
  const auto codes = await_processes(start_processes(
      2,
      [](Rank &rank) {
        NetRank mine(rank);
        MessageBench first = mine.bench(20);
        first.communicator->barrier({1, "both are here"}, *first.stream);
        first.finish();
        rank.meet();  // rank 0 also has all messages of the barrier
        const bool starved = rank.rank() == 1;
        starving.store(starved);
        const Error error = error_of([&] {
          rank.meet();
          // The other rank's messages come first, and there is no memory to keep them.
          for (int i = 0; starved && i < 2000 && !rank.failure.failed(); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          MessageBench second = mine.bench(21);
          second.communicator->barrier({1, "second"}, *second.stream);
          second.finish();
        });
        starving.store(false);
        require(error.status == (starved ? FSDP_OUT_OF_MEMORY : FSDP_TIMEOUT) ||
                    (!starved && error.status == FSDP_PEER_FAILED),
                fmt::format("{}: {}", error.status, error.message));
      },
      options));
  EXPECT_EQ(codes, (std::vector<int>{0, 0}));
}

// There is no memory for the link of a peer that has been admitted. A rank that connects later finds no remains of it.
TEST(NetMemory, NoneForALinkFailsTheContextAlone) {
  if (over_ucx()) GTEST_SKIP() << "of TCP's thread";
  RankOptions options;
  options.timeout_ms = 3'000;
  const auto codes = await_processes(start_processes(
      2,
      [](Rank &rank) {
        NetRank mine(rank);
        if (rank.rank() == 1) starving_size.store(sizeof(tcp::Link));
        rank.meet();
        const Error error = error_of([&] {
          MessageBench bench = mine.bench(20);
          bench.communicator->barrier({1, "both are here"}, *bench.stream);
          bench.finish();
        });
        starving_size.store(0);
        require(rank.rank() == 0 || error.status == FSDP_OUT_OF_MEMORY, error.message);
        const auto address = mine.net->address();
        const Endpoint place = parse_address({reinterpret_cast<const char *>(address.data()), address.size()});
        for (int i = 0; i < 3; ++i) {
          int code = 0;
          const Fd stranger = begin_connecting(place, code);
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
      },
      options));
  EXPECT_EQ(codes, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace fsdp::transport::test
