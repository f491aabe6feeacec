// SPDX-License-Identifier: Apache-2.0
#include "membership/join/porch.h"

#include <cerrno>
#include <cstring>

#include "membership/wire/packet.h"

namespace fsdp::membership {
namespace {

Fd make_unix_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail_errno(errno, "a socket for the ranks of this host");
  return socket;
}

Address address_of(const WorldOptions &options, const std::string &host_id) {
  WorldOptions place;
  const WipedText wiped(place.secret);
  place.rendezvous =
      format_text("host {} before rendezvous '{}' (attempt {})", host_id, options.rendezvous, options.attempt);
  place.secret = options.secret;
  return Address(place);
}

}  // namespace

Porch::Porch(const WorldOptions &options, const std::string &host_id) : address_(address_of(options, host_id)) {}

// Bound, it takes no connections yet.
bool Porch::take() {
  if (socket_) return true;
  Fd socket = make_unix_socket();
  if (::bind(socket.get(), address_.get(), address_.length()) == 0) socket_ = std::move(socket);
  return taken();
}

Fd Porch::visit(std::string &problem) const {
  Fd socket = make_unix_socket();
  if (::connect(socket.get(), address_.get(), address_.length()) != 0) {
    problem = format_text("the rank of this host that has come first: {}",
                          errno == ECONNREFUSED ? "it has not found rank 0 yet" : std::strerror(errno));
    return {};
  }
  const uint32_t user = peer_user(socket);
  if (user == ::geteuid()) return socket;
  stranger_ = user;
  problem = format_text("a process of user {} listens where the ranks of this host meet", user);
  return {};
}

std::string Porch::listen_for_hosts(Endpoint at) {
  at.set_port(0);
  hosts_ = listen_at(at, SOMAXCONN);
  return hosts_ ? Endpoint::local(hosts_).text() : std::string();
}

Listeners &Porch::open() {
  if (socket_ && ::listen(socket_.get(), SOMAXCONN) == 0) listeners_.add(std::move(socket_));
  if (hosts_) listeners_.add(std::move(hosts_));
  return listeners_;
}

void Porch::close() noexcept {
  socket_.reset();
  hosts_.reset();
  listeners_.clear();
}

}  // namespace fsdp::membership
