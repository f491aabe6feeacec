// SPDX-License-Identifier: Apache-2.0
// The other ranks of a job as one of them sees them over TCP: the addresses of all, and more of those few that it
// exchanges messages with.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/message/transport.h"
#include "comm/tcp/introduction.h"
#include "comm/tcp/link.h"

namespace fsdp::comm::tcp {

struct Peer {
  using Clock = std::chrono::steady_clock;

  // -- under the mutex --
  messages::Loss loss;
  bool expected = false;  // there will be a connection, which then lasts
  bool greeting = false;  // this rank is to connect to it
  bool open = false;      // both have greeted
  bool writing = false;   // the thread writes: nobody else may
  bool closing = false;   // the thread is to end all that is under way
  bool dirty = false;     // it is among dirty_
  uint64_t sequence = 0;
  std::vector<OutFrame> queued;
  Clock::time_point expiry;  // of connecting
  // Made and ended by the thread, under the mutex; read and written by the thread alone, without it.
  std::unique_ptr<Link> link;
  // -- of the thread --
  std::unique_ptr<Introduction> dialing;
  Clock::time_point redial;
  std::chrono::milliseconds pause{};
  bool blocked = false;  // the socket takes no more at the moment
};

class Peers {
 public:
  // places: by rank; one without a length has told none.
  void set_places(std::vector<Endpoint> places) {
    peers_.resize(places.size());
    places_ = std::move(places);
  }
  size_t size() const noexcept { return places_.size(); }
  bool empty() const noexcept { return places_.empty(); }
  const Endpoint &place(uint32_t rank) const noexcept { return places_[rank]; }
  bool has_place(uint32_t rank) const noexcept { return places_[rank].length() != 0; }
  // NULL: nothing has been sent to it or expected from it.
  const Peer *find(uint32_t rank) const noexcept { return peers_[rank].get(); }
  // What exists is found without an allocation.
  Peer &operator[](uint32_t rank) {
    if (!peers_[rank]) peers_[rank] = std::make_unique<Peer>();
    return *peers_[rank];
  }
  // Calls for each that exists, until one says false. Returns whether none has.
  template <class Ask>
  bool all_of(Ask &&ask) const {
    for (const auto &peer : peers_)
      if (peer && !ask(*peer)) return false;
    return true;
  }

 private:
  std::vector<Endpoint> places_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace fsdp::comm::tcp
