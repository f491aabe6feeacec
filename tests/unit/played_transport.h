// SPDX-License-Identifier: Apache-2.0
// A transport that stands in for peers: a test passes a channel what peers send, and sees what the channel sends.
#pragma once

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net_ranks.h"
#include "transport/call/launch.h"
#include "transport/message/channel/channel.h"

namespace fsdp::transport::test {

using messages::Channel;
using messages::Header;
using messages::Kind;
using messages::PeerLoss;
using messages::Place;
using messages::Receiver;
using messages::Stage;

constexpr uint64_t played_key = 7, chunk_bytes = 61440;

// The transport of rank 0. It records sent data, and treats it as sent at once.
class PlayedTransport final : public messages::Transport {
 public:
  PlayedTransport() : Transport(0) {}
  messages::TransportTraits traits() const noexcept override { return {in_order, true, true}; }
  std::vector<std::byte> address() const override { return {}; }
  const std::string &warnings() const noexcept override { return none_; }
  void join(NetJob, std::shared_ptr<Seat>) override {}
  bool connected(uint32_t) const noexcept override { return true; }
  void greet(uint32_t) override {}
  void send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) override {
    if (header.kind == Kind::answer) answers.emplace_back(to, header.chunk);
    calls.fetch_add(header.kind == Kind::call);
    if (header.kind == Kind::ended && bytes == sizeof told) std::memcpy(&told, payload, bytes);
  }
  void prepare(uint32_t) override {
    if (keeps_data && under_way > 0) throw std::bad_alloc();
  }
  void send_data(uint32_t to, const Header &header, const void *data) override {
    sent.push_back({to, header.bytes, data});
    kinds.push_back(header.kind);
    ++under_way;
    if (keeps_data) return;
    --under_way;
    receiver().sent(Kind::data, to);
  }
  const PeerLoss &loss_of(uint32_t) const noexcept override { return well_; }
  void cut(uint32_t to) noexcept override {
    for (; under_way > 0; --under_way) receiver().sent(Kind::data, to);
    cuts.push_back(to);
    if (arriving && arriving->from == to) receiver().lost(*std::exchange(arriving, std::nullopt));
  }
  void wake() noexcept override {}
  Receiver &receiver() { return *receivers_.find(played_key); }
  bool has_receiver() const { return receivers_.find(played_key) != nullptr; }

  std::atomic<int> calls{0};
  std::vector<std::pair<uint32_t, uint64_t>> answers;  // ranks that were answered, with the number of the question
  messages::Ended told{};                              // the latest report of the end of this rank
  struct Sent {
    uint32_t to;
    uint64_t bytes;
    const void *data;
    bool operator==(const Sent &) const = default;
  };
  std::vector<Sent> sent;
  std::vector<Kind> kinds;  // of what was sent
  std::vector<uint32_t> cuts;
  std::optional<Header> arriving;  // a message that is lost when its sender is cut
  bool in_order = true;
  bool keeps_data = false;  // keeps data until it is cut, with memory for one message only
  int under_way = 0;

 private:
  std::string none_;
  PeerLoss well_;
};

inline Header header_of(const Launch &launch, Kind kind, uint32_t from, uint64_t bytes) {
  Header header{};
  header.magic = messages::header_magic;
  header.kind = kind;
  header.from = from;
  header.key = played_key;
  header.round = launch.round;
  header.number = launch.number;
  header.call = launch.fingerprint.hash;
  header.bytes = bytes;
  return header;
}

}  // namespace fsdp::transport::test
