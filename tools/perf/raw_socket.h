// SPDX-License-Identifier: Apache-2.0
// The reference of what goes between hosts: one TCP connection that carries bytes both ways at once, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/fd.h"

namespace perf {

class RawSocket {
 public:
  // Rank 0 listens; port() is passed on to rank 1, which connects.
  RawSocket() = default;
  void listen();
  uint16_t port() const { return port_; }
  void accept();
  void connect(const std::string &address, uint16_t port);
  // Of the interface that the connection uses here.
  std::string local_address() const;
  // Sends `bytes` and receives as many.
  void swap(const std::byte *from, std::byte *to, uint64_t bytes);

 private:
  void prepare();

  fsdp::Fd listener_, connection_;
  uint16_t port_ = 0;
};

}  // namespace perf
