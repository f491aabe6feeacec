// SPDX-License-Identifier: Apache-2.0
// Where a job meets: an abstract unix socket, which ends with the process that listens.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "membership/job.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {

class Address {
 public:
  explicit Address(const WorldOptions &options) {
    const std::string name = socket_name(options.rendezvous, options.secret, ::geteuid());
    address_.sun_family = AF_UNIX;
    std::memcpy(address_.sun_path + 1, name.data(), name.size());  // after the NUL that makes it abstract
    length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr *get() const noexcept { return reinterpret_cast<const sockaddr *>(&address_); }
  socklen_t length() const noexcept { return length_; }

 private:
  sockaddr_un address_{};
  socklen_t length_;
};

}  // namespace fsdp::membership
