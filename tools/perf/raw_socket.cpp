// SPDX-License-Identifier: Apache-2.0
#include "perf/raw_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "membership/wire/endpoint.h"

namespace perf {
namespace {

// Bytes of one call: of 32 KiB to 1 MiB the fastest where both ends share caches.
constexpr uint64_t piece = uint64_t{32} << 10;

void check(bool well, const char *what) {
  if (!well) fsdp::fail_errno(errno, std::string("the raw socket: ") + what);
}

// Bytes moved; 0: not now.
uint64_t moved(ssize_t result, const char *what) {
  if (result < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  check(result > 0, what);
  return static_cast<uint64_t>(result);
}

}  // namespace

void RawSocket::listen() {
  listener_ = fsdp::Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  check(::bind(listener_.get(), reinterpret_cast<sockaddr *>(&any), sizeof any) == 0, "bind");
  check(::listen(listener_.get(), 1) == 0, "listen");
  socklen_t length = sizeof any;
  check(::getsockname(listener_.get(), reinterpret_cast<sockaddr *>(&any), &length) == 0, "getsockname");
  port_ = ntohs(any.sin_port);
}

void RawSocket::accept() {
  pollfd ready{listener_.get(), POLLIN, 0};
  if (::poll(&ready, 1, 10'000) != 1) fsdp::fail(FSDP_TIMEOUT, "the raw socket: rank 1 does not connect");
  connection_ = fsdp::Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  prepare();
}

void RawSocket::connect(const std::string &address, uint16_t port) {
  connection_ = fsdp::Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  if (::inet_pton(AF_INET, address.c_str(), &to.sin_addr) != 1)
    fsdp::fail(FSDP_INVALID_ARGUMENT, "--address '{}' is not an IPv4 address", address);
  check(::connect(connection_.get(), reinterpret_cast<sockaddr *>(&to), sizeof to) == 0, "connect");
  prepare();
}

std::string RawSocket::local_address() const { return fsdp::membership::Endpoint::local(connection_).address(); }

void RawSocket::prepare() {
  const int yes = 1;
  check(::setsockopt(connection_.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0, "TCP_NODELAY");
  check(::fcntl(connection_.get(), F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
}

void RawSocket::swap(const std::byte *from, std::byte *to, uint64_t bytes) {
  uint64_t sent = 0, received = 0;
  while (sent < bytes || received < bytes) {
    uint64_t now = 0;
    if (sent < bytes) {
      const uint64_t some =
          moved(::send(connection_.get(), from + sent, std::min(piece, bytes - sent), MSG_NOSIGNAL), "send");
      sent += some;
      now += some;
    }
    if (received < bytes) {
      const uint64_t some =
          moved(::recv(connection_.get(), to + received, std::min(piece, bytes - received), 0), "recv");
      received += some;
      now += some;
    }
    if (now) continue;
    pollfd ready{connection_.get(), static_cast<short>((sent < bytes ? POLLOUT : 0) | (received < bytes ? POLLIN : 0)),
                 0};
    check(::poll(&ready, 1, 60'000) > 0, "the peer does not answer: poll");
  }
}

}  // namespace perf
