// SPDX-License-Identifier: Apache-2.0
#include "flood.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <vector>

#include "life.h"

namespace network {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
constexpr size_t datagram_bytes = 56;          // as a heartbeat between hosts
constexpr size_t max_held_connections = 8000;  // silent connections; with more, the oldest ends

std::vector<sockaddr_in> parse_places(const std::string &text) {
  std::vector<sockaddr_in> places;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t colon = word.rfind(':');
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_port = htons(static_cast<uint16_t>(std::stoul(word.substr(colon + 1))));
    if (::inet_pton(AF_INET, word.substr(0, colon).c_str(), &place.sin_addr) != 1)
      throw std::runtime_error("no address: " + word);
    places.push_back(place);
  }
  return places;
}

// An attacker that has read the source can send this: everything except the mark and the proof, which need the job's
// secret.
class Datagrams {
 public:
  Datagrams() : socket_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    std::minstd_rand random;
    for (auto &datagram : bytes_) {
      for (char &byte : datagram) byte = static_cast<char>(random());
      const uint32_t node = 0, beat = 1;
      std::memcpy(datagram + 8, &node, sizeof node);
      std::memcpy(datagram + 12, &beat, sizeof beat);
    }
    // One call sends many datagrams, which the kernel separates where they arrive.
    const int each = datagram_bytes;
    if (::setsockopt(socket_, IPPROTO_UDP, UDP_SEGMENT, &each, sizeof each) != 0)
      throw std::runtime_error("no UDP_SEGMENT");
  }
  ~Datagrams() { ::close(socket_); }
  Datagrams(const Datagrams &) = delete;
  Datagrams &operator=(const Datagrams &) = delete;
  // Returns how many were sent.
  uint64_t send(const sockaddr_in &to, uint64_t count) {
    const size_t bytes = std::min<uint64_t>(count, most) * datagram_bytes;
    const ssize_t sent = ::sendto(socket_, bytes_, bytes, 0, reinterpret_cast<const sockaddr *>(&to), sizeof to);
    return sent < 0 ? 0 : static_cast<uint64_t>(sent) / datagram_bytes;
  }
  static constexpr uint64_t most = 64;  // per call: as many as UDP_SEGMENT allows

 private:
  int socket_;
  char bytes_[most][datagram_bytes];
};

// Makes connections that send nothing.
class Connections {
 public:
  ~Connections() {
    for (const int socket : held_) ::close(socket);
  }
  Connections() = default;
  Connections(const Connections &) = delete;
  Connections &operator=(const Connections &) = delete;
  static constexpr uint64_t most = 1;
  uint64_t send(const sockaddr_in &to, uint64_t) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket < 0) throw std::runtime_error("no descriptor for another connection");
    const int code = ::connect(socket, reinterpret_cast<const sockaddr *>(&to), sizeof to);
    held_.push_back(socket);
    if (held_.size() > max_held_connections) {
      ::close(held_.front());
      held_.pop_front();
    }
    return code == 0 || errno == EINPROGRESS;
  }

 private:
  std::deque<int> held_;
};

template <class Kind>
json flood_by(const std::vector<sockaddr_in> &places, uint64_t rate, double seconds) {
  Kind kind;
  const auto start = Clock::now();
  uint64_t tried = 0, sent = 0, turn = 0;
  say({{"flooding", harness::now()}});
  for (;;) {
    const double gone = std::chrono::duration<double>(Clock::now() - start).count();
    if (gone >= seconds) return {{"status", "FSDP_OK"}, {"sent", sent}, {"tried", tried}, {"seconds", gone}};
    // A machine that is too slow for the rate falls behind. At most the packets of a tenth of a second are due at once.
    const auto due = static_cast<uint64_t>(gone * static_cast<double>(rate));
    tried = std::max(tried, due - std::min(due, rate / 10));
    for (const auto end = Clock::now() + std::chrono::milliseconds(100); tried < due && Clock::now() < end; ++turn) {
      const uint64_t count = std::min(due - tried, Kind::most);
      sent += kind.send(places[turn % places.size()], count);
      tried += count;
    }
    ::usleep(500);
  }
}

}  // namespace

json flood(const Options &options) {
  const auto places = parse_places(options.text("flood"));
  const uint64_t rate = options.number("rate", 1000);
  const double seconds = options.number("seconds", 1);
  if (options.text("kind") == "connections") return flood_by<Connections>(places, rate, seconds);
  return flood_by<Datagrams>(places, rate, seconds);
}

}  // namespace network
