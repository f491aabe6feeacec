// SPDX-License-Identifier: Apache-2.0
// Tests the parts of messages between hosts that are specific to UCX: its settings, its protocols, and strangers at its
// port.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "../own_folder.h"
#include "base/fd.h"
#include "net_ranks.h"
#include "transport/message/ucx/transport.h"
#include "transport/message/ucx/worker.h"

namespace fsdp::transport::test {
namespace {

// This holds however UCX is told to send them.
TEST(UcxMessages, AreThePlainSumsByEitherProtocol) {
  for (const char *threshold : {"0", "inf"}) {
    ::setenv("UCX_RNDV_THRESH", threshold, 1);
    for (const uint32_t size : {2U, 3U}) expect_well(run_threads(size, all_messages));
  }
  ::unsetenv("UCX_RNDV_THRESH");
}

// A process that has the address sends tagged messages of any length. Some are hellos in the name of ranks.
void disturb(const std::vector<std::byte> &address) {
  const auto ignore = [](void *, const void *, size_t, void *, size_t, const ucp_am_recv_param_t *) { return UCS_OK; };
  ucx::Worker stranger(0, 61440, false, 1, ignore, nullptr);
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
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // all answers to these messages have come
    rank.meet();
    MessageBench bench = mine.bench();
    check_messages(bench, 0, {5, 65'538});
    rank.meet();
  }));
}

uint16_t free_port() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  socklen_t length = sizeof any;
  require(::bind(socket.get(), reinterpret_cast<sockaddr *>(&any), length) == 0, "bind");
  require(::getsockname(socket.get(), reinterpret_cast<sockaddr *>(&any), &length) == 0, "getsockname");
  return ntohs(any.sin_port);
}

// Rank 1's port is closed for a while after rank 0 has begun to connect to it.
TEST(UcxFailure, ARefusedConnectionIsTriedAgain) {
  const uint16_t port = free_port();
  const auto codes = await_processes(start_processes(2, [port](Rank &rank) {
    const auto seat = create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure);
    ::setenv("UCX_LOG_LEVEL", "fatal", 1);
    if (rank.rank() == 1) ::setenv("UCX_TCP_PORT_RANGE", fmt::format("{}-{}", port, port).c_str(), 1);
    std::unique_ptr<Net> net = create_ucx_net(rank.rank(), false);
    const auto addresses = rank.team->all_gather(net->address(), "addresses");
    if (rank.rank() == 1) {
      net.reset();
      rank.meet();
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      net = create_ucx_net(1, false);
    }
    net->join(test_job(addresses), seat, *rank.device);
    MessageBench bench(rank, net->create_collectives({0, 1}, messages_key, "messages"));
    const auto start = std::chrono::steady_clock::now();
    if (rank.rank() == 0) rank.meet();
    check_messages(bench, 7, {1001});
    require(rank.rank() == 1 || seconds_since(start) > 0.3, "rank 1 could be reached at once");
    rank.meet();
  }));
  EXPECT_EQ(codes, (std::vector<int>{0, 0}));
}

TEST(UcxOptions, DangerousOnesAreWarnedOf) {
  EXPECT_EQ(create_ucx_net(0, false)->warnings(), "");
  ::setenv("UCX_ZCOPY_THRESH", "1K", 1);
  const std::string warnings = create_ucx_net(0, false)->warnings();
  ::setenv("UCX_ZCOPY_THRESH", "1M", 1);
  EXPECT_EQ(create_ucx_net(0, false)->warnings(), "");
  ::unsetenv("UCX_ZCOPY_THRESH");
  EXPECT_NE(warnings.find("UCX_ZCOPY_THRESH is '1K'"), std::string::npos) << warnings;
}

TEST(UcxOptions, ALibraryThatIsNotThereIsNamed) {
  const fsdp::test::OwnFolder folder;
  const std::string missing = folder / "libucp.so";
  ::setenv("FSDP_UCX_LIBRARY", missing.c_str(), 1);
  const Error error = error_of([] { create_ucx_net(0, false); });
  ::unsetenv("FSDP_UCX_LIBRARY");
  EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
  EXPECT_NE(error.message.find(missing), std::string::npos) << error.message;
}

}  // namespace
}  // namespace fsdp::transport::test
