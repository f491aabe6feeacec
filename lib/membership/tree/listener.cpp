// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/listener.h"

#include <cerrno>

#include "base/error.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {
namespace {

constexpr int backlog = 512;

Fd bind_datagrams(const Endpoint &at) {
  Fd socket(::socket(at.family(), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket && ::bind(socket.get(), at.get(), at.length()) != 0) socket.reset();
  return socket;
}

}  // namespace

LeaderListener open_leader_listener(const std::string &interface_address) {
  std::string problem;
  const auto found = Endpoint::numeric(interface_address, 0, problem);
  if (found.empty()) fail(FSDP_INVALID_ARGUMENT, "the interface '{}': {}", interface_address, problem);
  for (int tries = 0; tries < 16; ++tries) {  // the port may be another program's, for datagrams
    LeaderListener listener;
    listener.stream = listen_at(found.front(), backlog);
    if (!listener.stream) fail_errno(errno, format_text("listening for other nodes at {}", interface_address));
    const Endpoint at = Endpoint::local(listener.stream);
    listener.datagrams = bind_datagrams(at);
    listener.address = at.text();
    if (listener.datagrams) return listener;
  }
  fail(FSDP_SYSTEM, "listening for other nodes at {}: no port is free for TCP and UDP", interface_address);
}

}  // namespace fsdp::membership
