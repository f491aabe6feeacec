// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one host come together before one of them goes to rank 0: an abstract unix socket by a name that
// ranks of this host, job and attempt know. Who has the name first goes, and takes the others along.
#pragma once

#include <optional>
#include <string>

#include "membership/join/address.h"
#include "membership/wire/listeners.h"

namespace fsdp::membership {

class Porch {
 public:
  // host_id: what the ranks of a host have in common.
  Porch(const WorldOptions &options, const std::string &host_id);

  // Does this rank have the name? Asked again, it may have become free: its owner has ended.
  bool take();
  bool taken() const noexcept { return static_cast<bool>(socket_); }
  // Of another rank that has it; empty, with `problem` set, if that does not take connections.
  Fd visit(std::string &problem) const;
  // Whose process listens there, if not one of this user.
  std::optional<uint32_t> stranger() const noexcept { return stranger_; }

  // Ranks of other hosts may come, too, to the interface of this address. Returns where; empty: they cannot.
  std::string listen_for_hosts(Endpoint at);
  // Opens it. The caller takes from these.
  Listeners &open();
  void close() noexcept;

 private:
  Address address_;
  Fd socket_, hosts_;
  Listeners listeners_;
  mutable std::optional<uint32_t> stranger_;
};

}  // namespace fsdp::membership
