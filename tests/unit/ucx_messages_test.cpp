// SPDX-License-Identifier: Apache-2.0
// Messages over UCX, on the loopback device: the results are those of any other way.
#include <gtest/gtest.h>

#include "comm/ucx/wire.h"
#include "comm/ucx/worker.h"
#include "net_ranks.h"

namespace fsdp::comm::test {
namespace {

void expect_well(const std::vector<std::string> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

void all_messages(Rank &rank) {
  NetRank mine(rank);
  MessageBench bench = mine.bench();
  check_messages(bench, 0, odd_counts);
  end_round(bench);
  check_messages(bench, 1000, {5, 65'538});
  rank.meet();
}

class Sizes : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(UcxMessages, Sizes, testing::Values(1, 2, 3, 4));

TEST_P(Sizes, AreThePlainSums) { expect_well(run_threads(GetParam(), all_messages)); }

// Chunks so small that every call is many windows long.
TEST_P(Sizes, AreThePlainSumsInSmallChunks) {
  ::setenv("FSDP_UCX_CHUNK_BYTES", "4096", 1);
  expect_well(run_threads(GetParam(), all_messages));
  ::unsetenv("FSDP_UCX_CHUNK_BYTES");
}

// Whatever way UCX is told to send them.
TEST_P(Sizes, AreThePlainSumsByEitherProtocol) {
  for (const char *threshold : {"0", "inf"}) {
    ::setenv("UCX_RNDV_THRESH", threshold, 1);
    expect_well(run_threads(GetParam(), all_messages));
  }
  ::unsetenv("UCX_RNDV_THRESH");
}

TEST_P(Sizes, AreThePlainSumsOnTheCallingThread) {
  RankOptions options;
  options.device.overlap = false;
  expect_well(run_threads(GetParam(), all_messages, options));
}

TEST(UcxMessages, DelaysDoNotMatter) {
  RankOptions options;
  options.device.delay_us = 300;
  expect_well(run_threads(3, all_messages, options));
}

TEST(UcxMessages, LargeOnesAreTheBitsOfSharedMemory) {
  expect_well(run_threads(2, [](Rank &rank) {
    NetRank mine(rank);
    MessageBench over_net = mine.bench(), over_memory(rank);
    const uint64_t count = (4 << 20) + 3;
    std::vector<float> sent = rough_values(rank.rank(), count, 5), staged = sent;
    const SumSpan by_net{sent.data(), count}, by_memory{staged.data(), count};
    over_net.communicator->all_reduce(std::span(&by_net, 1), {1, "large"}, *over_net.stream);
    over_memory.communicator->all_reduce(std::span(&by_memory, 1), {1, "large"}, *over_memory.stream);
    over_net.finish();
    over_memory.finish();
    require_same(sent.data(), staged.data(), count, "all_reduce over both");
    require(over_net.communicator->sent_bytes() == count * sizeof(float), "each byte crosses once");
    rank.meet();
  }));
}

TEST(UcxMessages, SeveralCommunicatorsAtOnce) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    std::vector<std::thread> threads;
    std::vector<std::string> problems(3);
    for (uint64_t i = 0; i < 3; ++i)
      threads.emplace_back([&, i] {
        try {
          // Not in the same order on all ranks: messages come for communicators that are not there yet.
          std::this_thread::sleep_for(std::chrono::milliseconds(20 * ((i + rank.rank()) % 3)));
          MessageBench bench = mine.bench(20 + i);
          check_messages(bench, 100 * i, {1001, 65'537});
        } catch (const std::exception &error) {
          problems[i] = error.what();
        }
      });
    for (auto &thread : threads) thread.join();
    for (const std::string &problem : problems) require(problem.empty(), problem);
    rank.meet();
  }));
}

TEST(UcxMessages, Exchanges) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    for (uint64_t bytes : {0, 1, 8, 1000, 3'000'000}) {
      const std::vector<std::byte> own = bytes_of(rank.rank(), bytes, bytes);
      std::vector<std::byte> all(bytes * 3 + 1, std::byte{77});
      mine.net->exchange(mine.all, exchanges_key, own.data(), bytes, all.data(), "numbers");
      for (uint32_t r = 0; r < 3; ++r)
        require_same_bytes(all.data() + r * bytes, bytes_of(r, bytes, bytes).data(), bytes,
                           fmt::format("of rank {}", r));
      require(all.back() == std::byte{77}, "wrote past its end");
    }
    rank.meet();
  }));
}

// Tagged messages of somebody who has the address: of any length, some of them hellos in the name of ranks.
void disturb(const std::vector<std::byte> &address) {
  const auto ignore = [](void *, const void *, size_t, void *, size_t, const ucp_am_recv_param_t *) { return UCS_OK; };
  ucx::Worker stranger(0, 61440, 1, ignore, nullptr);
  ucp_ep_params_t to{};
  to.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  to.address = reinterpret_cast<const ucp_address_t *>(address.data());
  ucp_ep_h endpoint = nullptr;
  require(stranger.api().ucp_ep_create(stranger.handle(), &to, &endpoint) == UCS_OK, "ucp_ep_create");
  const std::vector<std::byte> noise(300'000, std::byte{7});
  const ucp_request_param_t plain{};
  for (const uint64_t tag :
       {ucx::hello_tag(0), ucx::hello_tag(1), ucx::hello_tag(77), ucx::hello_tag(UINT32_MAX), uint64_t{0}})
    for (const uint64_t bytes : {0, 9, 5'000, 300'000})
      stranger.await(stranger.api().ucp_tag_send_nbx(endpoint, noise.data(), bytes, tag, &plain), 1000);
  stranger.await(stranger.api().ucp_worker_flush_nbx(stranger.handle(), &plain), 1000);
  stranger.end();
}

TEST(UcxMessages, AStrangersHellosDoNotKeepRanksApart) {
  expect_well(run_threads(2, [](Rank &rank) {
    NetRank mine(rank);
    for (const auto &address : rank.team->all_gather(mine.net->address(), "addresses"))
      if (rank.rank() == 0) disturb(address);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // all answers to these have come
    rank.meet();
    MessageBench bench = mine.bench();
    check_messages(bench, 0, {5, 65'538});
    rank.meet();
  }));
}

TEST(UcxMessages, ScratchIsWhatItSays) {
  expect_well(run_threads(2, [](Rank &rank) {
    NetRank mine(rank);
    require(mine.net->scratch_bytes(2) == 2 * 64 * 61440, fmt::format("{} bytes", mine.net->scratch_bytes(2)));
    for (uint32_t ranks : {3, 16, 17, 100, 1000, 4000})
      require(mine.net->scratch_bytes(ranks) <= 64 << 20, fmt::format("{} ranks", ranks));
    rank.meet();
  }));
}

TEST(UcxOptions, DangerousOnesAreWarnedOf) {
  EXPECT_EQ(create_net(0)->warnings(), "");
  ::setenv("UCX_ZCOPY_THRESH", "1K", 1);
  const std::string warnings = create_net(0)->warnings();
  ::setenv("UCX_ZCOPY_THRESH", "1M", 1);
  EXPECT_EQ(create_net(0)->warnings(), "");
  ::unsetenv("UCX_ZCOPY_THRESH");
  EXPECT_NE(warnings.find("UCX_ZCOPY_THRESH is '1K'"), std::string::npos) << warnings;
}

TEST(UcxOptions, AreChecked) {
  for (const char *bad : {"x", "100", "4095", "4097", "-1", "1000000000000", "99999999999999999999999"}) {
    ::setenv("FSDP_UCX_CHUNK_BYTES", bad, 1);
    EXPECT_EQ(error_of([] { create_net(0); }).status, FSDP_INVALID_ARGUMENT) << bad;
  }
  ::unsetenv("FSDP_UCX_CHUNK_BYTES");
  ::setenv("FSDP_UCX_LIBRARY", "/nowhere/libucp.so", 1);
  const Error error = error_of([] { create_net(0); });
  ::unsetenv("FSDP_UCX_LIBRARY");
  EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
  EXPECT_NE(error.message.find("/nowhere/libucp.so"), std::string::npos) << error.message;
}

}  // namespace
}  // namespace fsdp::comm::test
