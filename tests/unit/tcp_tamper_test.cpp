// SPDX-License-Identifier: Apache-2.0
// A process between two ranks passes on their bytes and changes four bits. Encryption or checksums notice this. Without
// either, the sums are wrong and no error is reported.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>

#include "membership/wire/endpoint.h"
#include "net_ranks.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t nowhere = UINT64_MAX;

// A process between the end that connects to it and the end that listens.
class Middle {
 public:
  // changed_at is the first of four bytes from the connecting end in which the process changes a bit. One of four
  // adjacent bytes is the exponent of a float; a smaller change may be lost in rounding.
  Middle(const Endpoint &to, uint64_t changed_at) : changed_at_(changed_at) {
    std::string problem;
    listener_ = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).front(), 4);
    place = Endpoint::local(listener_).text();
    thread_ = std::thread([this, to] { pass_on(to); });
  }
  // Waits until both ends have closed: what one sent before it closed still reaches the other.
  ~Middle() {
    over_.store(true);
    thread_.join();
  }
  bool changed() const { return changed_.load(); }

  std::string place;

 private:
  void pass_on(const Endpoint &to) {
    Fd ends[2];
    while (!over_.load() && !(ends[0] = accept_from(listener_))) std::this_thread::sleep_for(1ms);
    int code = 0;
    ends[1] = begin_connecting(to, code);
    while (!over_.load() && connecting_result(ends[1], to) == EINPROGRESS) std::this_thread::sleep_for(1ms);
    bool open[2] = {static_cast<bool>(ends[1]), static_cast<bool>(ends[1])};
    while (open[0] || open[1]) {
      // poll ignores an end whose descriptor is negative.
      pollfd polls[2] = {{open[0] ? ends[0].get() : -1, POLLIN, 0}, {open[1] ? ends[1].get() : -1, POLLIN, 0}};
      ::poll(polls, 2, 10);
      for (const int from : {0, 1})
        if (polls[from].revents && !pass(ends[from], ends[1 - from], from == 0)) {
          ::shutdown(ends[1 - from].get(), SHUT_WR);
          open[from] = false;
        }
    }
  }
  // Returns false when no more bytes will come from one end, or the other takes none.
  bool pass(const Fd &from, const Fd &to, bool forth) {
    std::array<char, 65536> bytes;
    const ssize_t count = ::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count <= 0) return count < 0 && errno == EAGAIN;
    const auto got = static_cast<uint64_t>(count);
    for (uint64_t i = 0; forth && i < got; ++i)
      if (const uint64_t at = passed_ + i; changed_at_ <= at && at - changed_at_ < sizeof(float)) {
        bytes[i] ^= 0x40;
        changed_.store(true);
      }
    if (forth) passed_ += got;
    for (uint64_t gone = 0; gone < got;) {
      const ssize_t sent = ::send(to.get(), bytes.data() + gone, got - gone, MSG_NOSIGNAL);
      if (sent > 0) gone += static_cast<uint64_t>(sent);
      if (sent < 0 && errno != EAGAIN) return false;
      if (sent < 0) std::this_thread::sleep_for(1ms);
    }
    return true;
  }

  const uint64_t changed_at_;
  Fd listener_;
  uint64_t passed_ = 0;
  std::atomic<bool> over_{false}, changed_{false};  // over_: waits for no connection any more
  std::thread thread_;
};

struct Seen {
  Error errors[2] = {Error(FSDP_OK, ""), Error(FSDP_OK, "")};
  bool right[2] = {false, false};  // whether the sums are right
  bool changed = false;
};

void sum(Rank &rank, Net &net, Seen &seen) {
  const uint64_t count = 100'003;
  const std::vector<uint32_t> both{0, 1};
  std::vector<float> values = rough_values(rank.rank(), count, 7), wanted(count);
  MessageBench bench(rank, net.create_collectives(both, messages_key, "messages"));
  const Sum span = everywhere_in_place(values.data(), count);
  bench.communicator->sum(std::span(&span, 1), false, {1, "sums"}, *bench.stream);
  bench.finish();
  add_in_rank_order(wanted, 2, 0, 7, false);
  seen.right[rank.rank()] = std::memcmp(values.data(), wanted.data(), count * sizeof(float)) == 0;
}

// Rank 0 sums with rank 1, with the man in the middle.
Seen sum_through(uint64_t changed_at, NetProtection protection, bool same_job = true, uint32_t timeout_ms = 0) {
  Seen seen;
  RankOptions options;
  if (timeout_ms) options.timeout_ms = timeout_ms;  // limits a rank that waits for one that never comes
  const auto sums = [&](Rank &rank) {
    std::unique_ptr<Middle> middle;
    {
      auto seat = create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure);
      auto net = create_tcp_net(rank.rank(), "127.0.0.1", protection);
      auto addresses = rank.team->all_gather(net->address(), "addresses");
      if (rank.rank() == 0) {
        auto &other = addresses[1];
        middle = std::make_unique<Middle>(parse_address({reinterpret_cast<const char *>(other.data()), other.size()}),
                                          changed_at);
        const auto *text = reinterpret_cast<const std::byte *>(middle->place.data());
        other.assign(text, text + middle->place.size());
      }
      NetJob job = test_job(addresses);
      job.nonce.assign(32, std::byte{static_cast<unsigned char>(same_job ? 7 : rank.rank())});
      net->join(std::move(job), seat, *rank.device);
      seen.errors[rank.rank()] = error_of([&] { sum(rank, *net, seen); });
    }
    if (middle) seen.changed = middle->changed();
  };
  const auto problems = run_threads(2, sums, options);
  for (const std::string &problem : problems) EXPECT_EQ(problem, "");
  return seen;
}

void expect_right_sums(const Seen &seen) {
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(seen.errors[r].status, FSDP_OK) << seen.errors[r].message;
    EXPECT_TRUE(seen.right[r]) << r;
  }
}

// The change is within the second chunk of data.
constexpr uint64_t in_a_chunk = 90'000;

TEST(TcpTamper, AProxyThatChangesNothingIsNotNoticed) {
  expect_right_sums(sum_through(nowhere, {}));
  expect_right_sums(sum_through(nowhere, {.checksum = true}));
  expect_right_sums(sum_through(nowhere, {.encryption = true}));
  expect_right_sums(sum_through(nowhere, {.checksum = true, .encryption = true}));
}

TEST(TcpTamper, WithoutAGuardSumsAreWrongWithoutAWord) {
  const Seen seen = sum_through(in_a_chunk, {});
  EXPECT_TRUE(seen.changed);
  EXPECT_EQ(seen.errors[0].status, FSDP_OK) << seen.errors[0].message;
  EXPECT_EQ(seen.errors[1].status, FSDP_OK) << seen.errors[1].message;
  EXPECT_FALSE(seen.right[0] && seen.right[1]);
}

TEST(TcpTamper, AChecksumNoticesAChangedBit) {
  const Seen seen = sum_through(in_a_chunk, {.checksum = true});
  EXPECT_TRUE(seen.changed);
  for (const Error &error : seen.errors) EXPECT_EQ(error.status, FSDP_PEER_FAILED) << error.message;
  EXPECT_EQ(seen.errors[1].rank, 0);
  EXPECT_EQ(seen.errors[1].origin_code, EBADMSG);
  for (const char *word : {"chunk ", " of call 0 (", "from rank 0 to rank 1 was changed on its way: its CRC32C is"})
    EXPECT_NE(seen.errors[1].message.find(word), std::string::npos) << seen.errors[1].message;
}

TEST(TcpTamper, EncryptionNoticesAChangedBit) {
  const Seen seen = sum_through(in_a_chunk, {.encryption = true});
  EXPECT_TRUE(seen.changed);
  for (const Error &error : seen.errors) EXPECT_EQ(error.status, FSDP_PEER_FAILED) << error.message;
  EXPECT_EQ(seen.errors[1].rank, 0);
  EXPECT_EQ(seen.errors[1].origin_code, EBADMSG);
  EXPECT_NE(seen.errors[1].message.find("what came from rank 0 to rank 1 was changed on its way: TLS: "),
            std::string::npos)
      << seen.errors[1].message;
}

// The change is in the first words within TLS, which come behind the proof and the greeting.
TEST(TcpTamper, AHandshakeThatIsChangedIsNotTriedAgain) {
  const Seen seen = sum_through(200, {.encryption = true}, true, 1'000);
  EXPECT_TRUE(seen.changed);
  EXPECT_EQ(seen.errors[0].status, FSDP_PEER_FAILED) << seen.errors[0].message;
  EXPECT_EQ(seen.errors[0].origin_code, EPROTO) << seen.errors[0].message;
  EXPECT_NE(seen.errors[1].status, FSDP_OK);
}

// The ranks know one secret, but belong to two jobs. The bytes of one job are useless in the other.
TEST(TcpTamper, KeysAreOfOneJob) {
  const Seen seen = sum_through(nowhere, {.encryption = true}, false, 2'000);
  EXPECT_EQ(seen.errors[0].status, FSDP_PEER_FAILED) << seen.errors[0].message;
  EXPECT_NE(seen.errors[0].message.find("TLS: "), std::string::npos) << seen.errors[0].message;
  EXPECT_EQ(seen.errors[0].origin_code, EPROTO);
  EXPECT_NE(seen.errors[1].status, FSDP_OK);
}

}  // namespace
}  // namespace fsdp::transport::test
