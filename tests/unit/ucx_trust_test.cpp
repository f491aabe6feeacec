// SPDX-License-Identifier: Apache-2.0
// UCX over TCP lets any process that reaches its port write this process's memory. So it is used only if the user says
// that the network is trusted.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>

#include "net_ranks.h"
#include "transport/message/ucx/worker.h"

namespace fsdp::transport::test {
namespace {

size_t listening_sockets() {
  size_t count = 0;
  for (const auto &file : std::filesystem::directory_iterator("/proc/self/fd")) {
    int listens = 0;
    socklen_t size = sizeof listens;
    const int fd = std::stoi(file.path().filename());
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens) ++count;
  }
  return count;
}

struct WithoutTrust {
  WithoutTrust() { ::unsetenv("FSDP_UCX_TCP"); }
  ~WithoutTrust() { use_loopback(); }
};

TEST(UcxTrust, TcpIsRefusedWithoutAWord) {
  {
    const auto net = create_ucx_net(0, false);
    EXPECT_GE(listening_sockets(), 1u);  // this port is the danger
  }
  const WithoutTrust none;
  const size_t before = listening_sockets();
  const Error error = error_of([] { create_ucx_net(0, false); });
  EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
  for (const char *word : {"tcp/lo", "FSDP_UCX_TCP=trusted", "write the memory", "on every rank"})
    EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  EXPECT_EQ(listening_sockets(), before);
}

TEST(UcxTrust, OtherWordsAreNone) {
  const WithoutTrust none;
  for (const char *word : {"1", "yes", "Trusted", "trusted "}) {
    ::setenv("FSDP_UCX_TCP", word, 1);
    const Error error = error_of([] { create_ucx_net(0, false); });
    EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT) << word;
    EXPECT_NE(error.message.find("FSDP_UCX_TCP='" + std::string(word)), std::string::npos) << error.message;
  }
}

// Ranks of one host share memory without UCX, which carries nothing there. A container's /dev/shm may have only 64 MB
// for all of them.
TEST(UcxTransports, TakeNoSharedMemory) {
  struct Restored {
    ~Restored() { use_loopback(); }
  } const restored;
  ::unsetenv("UCX_TLS");
  const auto net = create_ucx_net(0, false);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    EXPECT_EQ(line.find("/dev/shm"), line.npos) << line;
    EXPECT_EQ(line.find("SYSV"), line.npos) << line;
  }
}

TEST(UcxTrust, OthersNeedNone) {
  const WithoutTrust none;
  for (const char *transports : {"self,posix", "^tcp"}) {
    ::setenv("UCX_TLS", transports, 1);
    EXPECT_FALSE(create_ucx_net(0, false)->address().empty()) << transports;
    EXPECT_EQ(listening_sockets(), 0u) << transports;
  }
}

// ucp_context_print_info of UCX 1.13.1 writes this text.
TEST(UcxTrust, TransportsAreReadFromWhatUcxSays) {
  const std::string text =
      "#\n# UCP context\n#\n#     component 1  :  tcp\n#\n#            md 1  :  component 1  tcp \n#\n"
      "#      resource 0  :  md 0  dev 0  flags -- self/memory0\n"
      "#      resource 12 :  md 1  dev 2  flags -- tcp/eth0\n"
      "#      resource 13 :  md 1  dev 2  flags -s rc_mlx5/mlx5_0:1\n#\n";
  EXPECT_EQ(ucx::transports_of(text), (std::vector<std::string>{"self/memory0", "tcp/eth0", "rc_mlx5/mlx5_0:1"}));
  EXPECT_TRUE(ucx::transports_of("another version writes something else\n").empty());
}

TEST(UcxTrust, AnUnknownListMayHoldTcp) {
  EXPECT_TRUE(ucx::may_use_tcp({}));
  EXPECT_TRUE(ucx::may_use_tcp({"self/memory0", "tcp/eth0"}));
  EXPECT_FALSE(ucx::may_use_tcp({"self/memory0", "rc_mlx5/mlx5_0:1"}));
  EXPECT_TRUE(ucx::leaves_host({"self/memory0", "rc_mlx5/mlx5_0:1"}));
  EXPECT_FALSE(ucx::leaves_host({"self/memory0", "posix/memory", "sysv/memory", "cma/memory", "cuda_ipc/cuda"}));
}

}  // namespace
}  // namespace fsdp::transport::test
