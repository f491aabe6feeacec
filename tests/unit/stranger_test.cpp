// SPDX-License-Identifier: Apache-2.0
// Processes that are not ranks of the job connect to it, or wait in the place of its rank 0. Neither disturbs the job.
#include <random>

#include "bootstrap_fixture.h"

namespace fsdp::transport::test {
namespace {

class Strangers : public Bootstrap {};

TEST_F(Strangers, HostileConnectionsDoNotDisturb) {
  const size_t zero = start(0U);
  std::vector<Fd> silent;
  for (int i = 0; i < 80; ++i) silent.push_back(connect());  // more than are served at once
  std::vector<Fd> gone;
  for (int i = 0; i < 20; ++i) gone.push_back(connect());
  gone.clear();
  const size_t one = start(1), two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Strangers, GarbageDoesNotDisturb) {
  const size_t zero = start(0U);
  std::mt19937 random(3);
  const auto send = [](const Fd &socket, const void *data, size_t bytes, std::span<const int> files = {}) {
    send_packet(socket, data, bytes, files);
  };
  std::vector<Fd> sockets;
  for (const size_t bytes : {0, 1, 16, 80, 500, 5000, 100'000}) {
    std::vector<uint8_t> garbage(bytes);
    for (auto &byte : garbage) byte = static_cast<uint8_t>(random());
    sockets.push_back(connect());
    send(sockets.back(), garbage.data(), bytes);
    // Sends the right head before garbage.
    auto answer = wire::make<wire::Answer>();
    if (bytes) std::memcpy(garbage.data(), &answer.head, std::min(bytes, sizeof answer.head));
    sockets.push_back(connect());
    send(sockets.back(), garbage.data(), bytes);
  }
  {  // Sends a join without proof, with descriptors.
    const int files[] = {0, 1};
    sockets.push_back(connect());
    join(sockets.back(), 1, files);
  }
  {  // Sends a proof over the wrong secret. The connection ends without an answer.
    sockets.push_back(connect());
    answer(sockets.back(), "not the secret");
    await_readable(sockets.back(), 5000);
    EXPECT_EQ(receive_packet(sockets.back())->bytes, 0U);
  }
  {  // A process knows the secret, but its join is nonsense.
    sockets.push_back(meet());
    join(sockets.back(), 77);
    const auto refusal = hear<wire::RefusedPacket>(sockets.back());
    ASSERT_TRUE(refusal);
    EXPECT_EQ(refusal->status, FSDP_INVALID_ARGUMENT);
    EXPECT_EQ(refusal->text.view(), "rank 77 is outside [0, 3)");
  }
  const size_t one = start(1), two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Strangers, AnotherVersionIsNamed) {
  const Address address(options);
  const Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address.get(), address.length()), 0);
  ASSERT_EQ(::listen(listener.get(), 5), 0);
  const size_t one = start(1);
  const Fd guest(::accept(listener.get(), nullptr, nullptr));
  auto challenge = wire::make<wire::Challenge>();
  challenge.head.version = 9;
  send_packet(guest, &challenge, sizeof challenge);
  finish();
  expect(one, FSDP_UNSUPPORTED, "rank 0 speaks version 9 of the bootstrap, the library of rank 1 speaks version 1");
}

TEST_F(Strangers, AFalseRankZeroIsNotTrusted) {
  const Address address(options);
  const Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address.get(), address.length()), 0);
  ASSERT_EQ(::listen(listener.get(), 5), 0);
  options.timeout_ms = 3000;
  const size_t one = start(1);
  const Fd guest(::accept(listener.get(), nullptr, nullptr));
  const auto challenge = wire::make<wire::Challenge>();
  send_packet(guest, &challenge, sizeof challenge);
  await_readable(guest, 5000);
  const auto answer = receive_packet(guest)->as<wire::Answer>();
  ASSERT_TRUE(answer);
  auto proof = wire::make<wire::Proof>();
  proof.digest = answer->digest;  // the same bytes are sent back
  send_packet(guest, &proof, sizeof proof);
  await_readable(guest, 5000);
  const auto next = receive_packet(guest);
  EXPECT_TRUE(next && next->bytes == 0);  // no join arrives, because the rank has hung up
  finish();
  expect(one, FSDP_TIMEOUT);
}

}  // namespace
}  // namespace fsdp::transport::test
