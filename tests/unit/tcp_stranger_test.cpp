// SPDX-License-Identifier: Apache-2.0
// A process without the job's secret reaches a rank's port, and changes nothing. The ranks connect, and their sums have
// the same bits as without it.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>

#include "membership/join/guest.h"
#include "membership/wire/endpoint.h"
#include "net_ranks.h"
#include "transport/message/tcp/introduction.h"
#include "transport/message/tcp/link.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

std::vector<std::byte> bytes_at(const void *data, size_t count) {
  const auto *begin = static_cast<const std::byte *>(data);
  return {begin, begin + count};
}

// Returns a stranger's bytes of the n-th kind: noise, other protocols, the proof with a digest of its own, and frames
// that would follow a proof.
std::vector<std::byte> kind_of_bytes(uint32_t n, const Endpoint &to) {
  std::minstd_rand random(n + 1);
  auto answer = wire::make<wire::Answer>();
  for (auto &byte : answer.nonce) byte = static_cast<uint8_t>(random());
  switch (n % 8) {
    case 0: return {};
    case 1: {
      const std::string text = "GET / HTTP/1.1\r\nHost: " + to.text() + "\r\n\r\n";
      return bytes_at(text.data(), text.size());
    }
    case 2:  // no digest at all
      return bytes_at(&answer, sizeof answer);
    case 3:  // the digest of another secret
      answer.digest = wire::guest_digest("guess " + std::to_string(n), {}, answer.nonce, ": libfsdp messages");
      return bytes_at(&answer, sizeof answer);
    case 4: {  // as if both had sent a greeting
      messages::Header header{};
      header.magic = messages::header_magic;
      header.kind = messages::Kind::data;
      header.bytes = uint64_t{1} << 63;
      const tcp::OutFrame frame = tcp::make_frame(header, 0, UINT32_MAX);
      return bytes_at(&frame.head, sizeof frame.head);
    }
    case 5: {
      const tcp::Greeting greeting{0x66736768, 1, 0x01020304, 2, 0, 1, 0, 0};
      return bytes_at(&greeting, sizeof greeting);
    }
    case 6: {  // another version, cut short
      answer.head.version = static_cast<uint32_t>(random());
      return bytes_at(&answer, random() % sizeof answer);
    }
    default: {
      std::vector<std::byte> noise(random() % 5'000);
      for (std::byte &byte : noise) byte = static_cast<std::byte>(random() & 0xff);
      return noise;
    }
  }
}

Endpoint place_of(const std::vector<std::byte> &address) {
  return parse_address({reinterpret_cast<const char *>(address.data()), address.size()});
}

// Connects and sends; keeps some of the connections open.
class Stranger {
 public:
  explicit Stranger(Endpoint to) : to_(to) {}
  void say(uint32_t n) {
    int code = 0;
    Fd socket = begin_connecting(to_, code);
    for (int i = 0; i < 10'000 && connecting_result(socket, to_) == EINPROGRESS; ++i)
      std::this_thread::sleep_for(100us);
    const auto bytes = kind_of_bytes(n, to_);
    if (!bytes.empty() && ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) ++heard;
    if (n % 3 == 0) kept_.push_back(std::move(socket));
    if (kept_.size() > 200) kept_.erase(kept_.begin());
  }
  // Checks the ranks' answers on connections that still exist: each is only a challenge.
  uint64_t longest_answer() {
    uint64_t longest = 0;
    for (const Fd &socket : kept_) {
      char bytes[4096];
      const ssize_t count = ::recv(socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      longest = std::max(longest, static_cast<uint64_t>(std::max<ssize_t>(count, 0)));
    }
    return longest;
  }
  uint32_t heard = 0;

 private:
  Endpoint to_;
  std::vector<Fd> kept_;
};

void sum_and_compare(MessageBench &over_net, MessageBench &over_memory, uint64_t seed) {
  const uint64_t count = 100'003;
  std::vector<float> sent = rough_values(over_net.rank.rank(), count, seed), staged = sent;
  const Sum by_net = everywhere_in_place(sent.data(), count), by_memory = everywhere_in_place(staged.data(), count);
  over_net.communicator->sum(std::span(&by_net, 1), false, {1, "sums"}, *over_net.stream);
  over_memory.communicator->sum(std::span(&by_memory, 1), false, {1, "sums"}, *over_memory.stream);
  over_net.finish();
  over_memory.finish();
  require_same(sent.data(), staged.data(), count, "sums beside strangers");
}

// A thousand kinds reach the ports of both ranks before they have joined, while they connect, and while they sum.
TEST(TcpStranger, ChangesNothing) {
  const auto problems = run_threads(2, [](Rank &rank) {
    auto seat = create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure);
    auto net = create_tcp_net(rank.rank(), "127.0.0.1");
    const auto addresses = rank.team->all_gather(net->address(), "addresses");
    Stranger stranger(place_of(addresses[1 - rank.rank()]));
    for (uint32_t n = 0; n < 300; ++n) stranger.say(n);
    std::atomic<bool> over{false};
    std::thread other([&] {
      for (uint32_t n = 300; n < 1000 || !over.load(); ++n) stranger.say(n);
    });
    std::string problem;
    try {
      net->join(test_job(addresses), seat, *rank.device);
      MessageBench over_memory(rank);
      MessageBench over_net(rank, net->create_collectives({0, 1}, messages_key, "messages"));
      for (uint64_t i = 0; i < 30; ++i) sum_and_compare(over_net, over_memory, i);
    } catch (const std::exception &error) {
      problem = error.what();
    }
    over.store(true);
    other.join();
    require(problem.empty(), problem);
    require(stranger.heard > 500, fmt::format("{} kinds were sent", stranger.heard));
    require(stranger.longest_answer() <= sizeof(wire::Challenge), "more than a challenge was answered");
    rank.meet();
  });
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

// More silent connections than a rank serves at once exist before its peers connect.
TEST(TcpStranger, SilentOnesDoNotKeepRanksApart) {
  const auto problems = run_threads(3, [](Rank &rank) {
    auto seat = create_lone_seat(rank.rank(), 3, rank.waiter, rank.failure);
    auto net = create_tcp_net(rank.rank(), "127.0.0.1");
    const auto addresses = rank.team->all_gather(net->address(), "addresses");
    std::vector<Fd> silent;
    int code = 0;
    for (int i = 0; i < 150; ++i) silent.push_back(begin_connecting(place_of(addresses[(rank.rank() + 1) % 3]), code));
    rank.meet();
    const auto start = std::chrono::steady_clock::now();
    net->join(test_job(addresses), seat, *rank.device);
    MessageBench over_memory(rank);
    MessageBench over_net(rank, net->create_collectives({0, 1, 2}, messages_key, "messages"));
    sum_and_compare(over_net, over_memory, 1);
    require(seconds_since(start) < patience_seconds, "the ranks connected late");
    rank.meet();
  });
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

// Collects a rank's log.
class Lines {
 public:
  NetLog log() {
    return [this](fsdp_log_level level, const std::string &text) {
      const std::lock_guard lock(mutex_);
      lines_.push_back((level == FSDP_LOG_WARNING ? "" : "no warning: ") + text);
    };
  }
  // Returns the line about the connection from that address, or an empty text if it does not come. A silent connection
  // has five seconds.
  std::string about(const std::string &from) {
    const auto start = std::chrono::steady_clock::now();
    while (seconds_since(start) < 60) {
      {
        const std::lock_guard lock(mutex_);
        for (const std::string &line : lines_)
          if (line.starts_with("refused a connection for messages from " + from + ": ")) return line;
      }
      std::this_thread::sleep_for(1ms);
    }
    return {};
  }
  size_t count() {
    const std::lock_guard lock(mutex_);
    return lines_.size();
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

// A process connects to a rank's port and sends the test's bytes.
class Knock {
 public:
  explicit Knock(const Endpoint &to) {
    int code = 0;
    socket_ = begin_connecting(to, code);
    for (int i = 0; i < 10'000 && connecting_result(socket_, to) == EINPROGRESS; ++i)
      std::this_thread::sleep_for(100us);
    from = Endpoint::local(socket_).text();
  }
  template <class M>
  void say(const M &message) {
    require(::send(socket_.get(), &message, sizeof message, MSG_NOSIGNAL) == sizeof message, "nobody listens");
  }
  template <class M>
  M hear() {
    M message;
    size_t got = 0;
    for (int i = 0; i < 100'000 && got < sizeof message; ++i) {
      const ssize_t count = ::recv(socket_.get(), reinterpret_cast<char *>(&message) + got, sizeof message - got, 0);
      if (count > 0) got += static_cast<size_t>(count);
      if (count < 0) std::this_thread::sleep_for(100us);
    }
    require(got == sizeof message, "the rank has not said enough");
    return message;
  }
  // Sends the right proof, as if it knew the secret.
  wire::Answer prove(const std::string &secret, uint32_t rank) {
    const auto challenge = hear<wire::Challenge>();
    auto answer = wire::make<wire::Answer>();
    answer.nonce = make_nonce();
    const std::string label = ": " + tcp::JobNames{secret, "a job of tests", rank, 2, {}, nullptr, {}}.label(rank);
    answer.digest = wire::guest_digest(secret, challenge.nonce, answer.nonce, label);
    say(answer);
    return answer;
  }
  void leave() { socket_.reset(); }
  bool connected() const {
    char byte;
    return ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN;
  }

  std::string from;

 private:
  Fd socket_;
};

void require_line(Lines &lines, const Knock &knock, const std::string &why) {
  const std::string line = lines.about(knock.from);
  require(line.find(why) != std::string::npos, fmt::format("of {}, who {}: '{}'", knock.from, why, line));
}

// Checks every kind of refusal, and the address in it.
void knock_in_every_way(const Endpoint &to, Lines &lines) {
  Knock silent(to), gone(to), noise(to), guess(to), right(to), replay(to), double_of_0(to);
  gone.leave();
  require_line(lines, gone, "hung up before it had proven the job secret");
  noise.say(std::array<char, 200>{'G', 'E', 'T', ' '});
  require_line(lines, noise, "what came is not of libfsdp");
  guess.prove("a guess", 1);
  require_line(lines, guess, "has another job secret, repeats a recorded proof");
  const wire::Answer answer = right.prove("a secret of tests", 1);
  right.say(tcp::Greeting{0x66736768, 1, 0x01020304, 3, 0, 1, 0, 0});
  require_line(lines, right, "a rank of another job, or of another version");
  replay.say(answer);
  require_line(lines, replay, "has another job secret, repeats a recorded proof");
  double_of_0.prove("a secret of tests", 1);
  double_of_0.say(tcp::Greeting{0x66736768, 1, 0x01020304, 2, 0, 1, 0, 0});
  require_line(lines, double_of_0, "it says that it is rank 0, which has a connection already");
  require_line(lines, silent, "it has said nothing");
}

TEST(TcpStranger, EachIsLoggedWithItsAddress) {
  const auto problems = run_threads(2, [](Rank &rank) {
    auto seat = create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure);
    auto net = create_tcp_net(rank.rank(), "127.0.0.1");
    const auto addresses = rank.team->all_gather(net->address(), "addresses");
    Lines lines;
    NetJob job = test_job(addresses);
    job.log = lines.log();
    net->join(std::move(job), seat, *rank.device);
    {
      MessageBench over_memory(rank);
      MessageBench over_net(rank, net->create_collectives({0, 1}, messages_key, "messages"));
      sum_and_compare(over_net, over_memory, 1);
      if (rank.rank() == 1) knock_in_every_way(place_of(addresses[1]), lines);
      rank.meet();
      sum_and_compare(over_net, over_memory, 2);
    }
    net.reset();
    require(lines.count() == (rank.rank() == 1 ? 7 : 0), fmt::format("{} lines", lines.count()));
  });
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

// A process that knows the secret sends plain text where ranks encrypt. The same is done by a rank that omits the job's
// protection, and by a process that has listened to a rank and continues for it.
TEST(TcpStranger, APlainConnectionToAnEncryptedPortIsRefused) {
  const auto problems = run_threads(2, [](Rank &rank) {
    auto seat = create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure);
    auto net = create_tcp_net(rank.rank(), "127.0.0.1", {.encryption = true});
    const auto addresses = rank.team->all_gather(net->address(), "addresses");
    Lines lines;
    NetJob job = test_job(addresses);
    job.log = lines.log();
    net->join(std::move(job), seat, *rank.device);
    if (rank.rank() == 1) {
      Knock plain(place_of(addresses[1])), greeted(place_of(addresses[1]));
      plain.prove("a secret of tests", 1);
      plain.hear<wire::Proof>();
      plain.say(tcp::Greeting{0x66736768, 1, 0x01020304, 2, 0, 1, 0, 0});
      require_line(lines, plain, "has another FSDP_NET_CHECKSUM or FSDP_NET_ENCRYPTION");
      greeted.prove("a secret of tests", 1);
      greeted.hear<wire::Proof>();
      greeted.say(tcp::Greeting{0x66736768, 1, 0x01020304, 2, 0, 1, 0, 1});
      greeted.hear<tcp::Greeting>();
      messages::Header header{};
      header.magic = messages::header_magic;
      header.kind = messages::Kind::ask;
      greeted.say(tcp::make_frame(header, 0, 0).head);
      require_line(lines, greeted, "TLS: ");
    }
    rank.meet();
    MessageBench over_memory(rank);
    MessageBench over_net(rank, net->create_collectives({0, 1}, messages_key, "messages"));
    sum_and_compare(over_net, over_memory, 1);
    rank.meet();
  });
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

// A rank that has proven the secret is in the middle of TLS, and more strangers come than there are places.
TEST(TcpStranger, ManyDoNotPushOutAConnectionThatHasProvenTheSecret) {
  const auto problems = run_threads(1, [](Rank &rank) {
    auto seat = create_lone_seat(1, 2, rank.waiter, rank.failure);
    auto net = create_tcp_net(1, "127.0.0.1", {.encryption = true});
    const Endpoint place = place_of(net->address());
    Lines lines;
    NetJob job = test_job({net->address(), net->address()});
    job.log = lines.log();
    net->join(std::move(job), seat, *rank.device);
    Knock proven(place);
    proven.prove("a secret of tests", 1);
    proven.hear<wire::Proof>();
    proven.say(tcp::Greeting{0x66736768, 1, 0x01020304, 2, 0, 1, 0, 1});
    proven.hear<tcp::Greeting>();
    std::vector<Fd> strangers;
    for (int round = 0; round < 2; ++round) {
      int code = 0;
      for (int i = 0; i < 100; ++i) strangers.push_back(begin_connecting(place, code));
      std::this_thread::sleep_for(300ms);
    }
    Knock last(place);
    last.hear<wire::Challenge>();  // so there has been a place for each of them
    require(lines.count() > 0, "nobody has made room");
    require(proven.connected(), "who had proven the secret has made room for strangers");
  });
  EXPECT_EQ(problems[0], "");
}

}  // namespace
}  // namespace fsdp::transport::test
