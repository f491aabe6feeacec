// SPDX-License-Identifier: Apache-2.0
// The other ranks of a job, as one rank sees them over TCP: the addresses of all, and the state of the few with which
// it exchanges messages.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "membership/wire/endpoint.h"
#include "transport/message/channel/transport.h"
#include "transport/message/tcp/introduction.h"
#include "transport/message/tcp/link.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::tcp {

// At which address of this host a rank listens for messages.

// Returns the address of FSDP_NET_INTERFACE (an interface's name or a numeric address), of the same family as `address`
// if the interface has one. If the variable is not set, returns `address`, by which this rank reached the rendezvous.
// Throws INVALID_ARGUMENT, naming the existing interfaces.
Endpoint find_interface(const std::string &address);

struct Peer {
  using Clock = std::chrono::steady_clock;

  // -- under the mutex --
  messages::PeerLoss loss;
  bool expected = false;  // a connection with the peer will exist, and then last
  bool greeting = false;  // this rank connects to the peer
  bool open = false;      // both ranks have greeted
  bool writing = false;   // the thread writes, so no caller may
  bool closing = false;   // the thread must end all transfers under way
  bool dirty = false;     // the peer is in dirty_
  uint64_t sequence = 0;
  std::vector<OutFrame> queued;
  Endpoint place;            // the address at which this rank connects to the peer
  Clock::time_point expiry;  // when connecting is given up
  // The thread makes and ends the link under the mutex. Only the thread reads and writes it, without the mutex.
  std::unique_ptr<Link> link;
  // -- used only by the thread --
  std::unique_ptr<Introduction> dialing;
  Clock::time_point redial;
  std::chrono::milliseconds pause{};
  bool blocked = false;  // the socket takes no more at the moment
};
// The thread finds the peers that it knows without the mutex, while callers make other peers under the mutex. So
// nothing here moves in memory.
class Peers {
 public:
  void set_addresses(NetAddresses addresses) {
    peers_.reserve(addresses.size());  // only a few of the pages are ever written
    numbers_.assign(addresses.size(), 0);
    addresses_ = std::move(addresses);
  }
  uint32_t size() const noexcept { return addresses_.size(); }
  bool empty() const noexcept { return numbers_.empty(); }
  // The address at which the rank says it listens; empty: it has given none.
  std::string_view address(uint32_t rank) const noexcept {
    const auto bytes = addresses_[rank];
    return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
  }
  // Returns NULL if nothing has been sent to the rank or expected from it.
  const Peer *find(uint32_t rank) const noexcept { return numbers_[rank] ? &known(rank) : nullptr; }
  // Makes the peer if it does not exist. An existing peer is found without an allocation.
  Peer &operator[](uint32_t rank) {
    if (!numbers_[rank]) {
      peers_.push_back(std::make_unique<Peer>());
      numbers_[rank] = static_cast<uint16_t>(peers_.size());
    }
    return known(rank);
  }
  // Calls `ask` for each existing peer until it returns false. Returns whether it returned true for all.
  template <class Ask>
  bool all_of(Ask &&ask) const {
    return std::ranges::all_of(peers_, [&](const auto &peer) { return ask(*peer); });
  }

 private:
  Peer &known(uint32_t rank) const noexcept { return *peers_.data()[numbers_[rank] - 1]; }

  NetAddresses addresses_;
  std::vector<uint16_t> numbers_;  // for each rank: its position in peers_, from 1 on; 0: it is not there
  std::vector<std::unique_ptr<Peer>> peers_;
};
static_assert(max_ranks < UINT16_MAX);

}  // namespace fsdp::transport::tcp
