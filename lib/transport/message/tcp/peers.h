// SPDX-License-Identifier: Apache-2.0
// The other ranks of a job as one of them sees them over TCP: the addresses of all, and more of those few that it
// exchanges messages with.
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

// That of FSDP_NET_INTERFACE (an interface's name, or a numeric address), in the family of `address` if it has one;
// else `address` itself, by which this rank reached the rendezvous. Throws INVALID_ARGUMENT naming the interfaces there
// are.
Endpoint find_interface(const std::string &address);

struct Peer {
  using Clock = std::chrono::steady_clock;

  // -- under the mutex --
  messages::Loss loss;
  bool expected = false;  // there will be a connection, which then lasts
  bool greeting = false;  // this rank is to connect to it
  bool open = false;      // both have greeted
  bool writing = false;   // the thread writes: no caller may
  bool closing = false;   // the thread is to end all that is under way
  bool dirty = false;     // it is among dirty_
  uint64_t sequence = 0;
  std::vector<OutFrame> queued;
  Endpoint place;            // where this rank connects to it
  Clock::time_point expiry;  // of connecting
  // Made and ended by the thread, under the mutex; read and written by the thread alone, without it.
  std::unique_ptr<Link> link;
  // -- of the thread --
  std::unique_ptr<Introduction> dialing;
  Clock::time_point redial;
  std::chrono::milliseconds pause{};
  bool blocked = false;  // the socket takes no more at the moment
};

// The thread finds those that it knows without the mutex while callers, under it, make others: so nothing here moves.
class Peers {
 public:
  void set_addresses(NetAddresses addresses) {
    peers_.reserve(addresses.size());  // of which few are written to, ever
    numbers_.assign(addresses.size(), 0);
    addresses_ = std::move(addresses);
  }
  uint32_t size() const noexcept { return addresses_.size(); }
  bool empty() const noexcept { return numbers_.empty(); }
  // Where it listens, as it has told; empty: it has told none.
  std::string_view address(uint32_t rank) const noexcept {
    const auto bytes = addresses_[rank];
    return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
  }
  // NULL: nothing has been sent to it or expected from it.
  const Peer *find(uint32_t rank) const noexcept { return numbers_[rank] ? &known(rank) : nullptr; }
  // What exists is found without an allocation.
  Peer &operator[](uint32_t rank) {
    if (!numbers_[rank]) {
      peers_.push_back(std::make_unique<Peer>());
      numbers_[rank] = static_cast<uint16_t>(peers_.size());
    }
    return known(rank);
  }
  // Calls for each that exists, until one says false. Returns whether none has.
  template <class Ask>
  bool all_of(Ask &&ask) const {
    return std::ranges::all_of(peers_, [&](const auto &peer) { return ask(*peer); });
  }

 private:
  Peer &known(uint32_t rank) const noexcept { return *peers_.data()[numbers_[rank] - 1]; }

  NetAddresses addresses_;
  std::vector<uint16_t> numbers_;  // of each rank: its place among the peers, from 1 on
  std::vector<std::unique_ptr<Peer>> peers_;
};
static_assert(most_ranks < UINT16_MAX);

}  // namespace fsdp::transport::tcp
