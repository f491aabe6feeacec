// SPDX-License-Identifier: Apache-2.0
// Who sends and receives messages under one key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/message/channel/wire.h"

namespace fsdp::transport::messages {

// Where a chunk goes. NULL: nowhere, it is dropped. misfit: nobody who keeps to the protocol sends this.
struct Place {
  std::byte *to = nullptr;
  bool misfit = false;
};

// All calls come with the transport's mutex held.
class Receiver {
 public:
  virtual void control(const Header &header, const void *payload, uint64_t bytes) = 0;
  virtual Place place(const Header &header, uint64_t bytes) = 0;
  virtual void arrived(const Header &header) = 0;
  virtual void lost(const Header &header) = 0;    // what place() had a place for
  virtual void sent(Kind kind, uint32_t to) = 0;  // or given up
  virtual void peer_failed(uint32_t world_rank) = 0;
  // After messages came or went: what more there is to send.
  virtual void move_on() = 0;

 protected:
  ~Receiver() = default;
};

}  // namespace fsdp::transport::messages
