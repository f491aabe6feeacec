// SPDX-License-Identifier: Apache-2.0

#include "membership/wire/endpoint.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/failure.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

namespace {

Fd make_socket(int family) { return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

void set_flag(const Fd &socket, int level, int name) {
  const int on = 1;
  ::setsockopt(socket.get(), level, name, &on, sizeof on);
}

int pending_error(const Fd &socket) {
  int code = 0;
  socklen_t length = sizeof code;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &length) == 0 ? code : errno;
}

bool connected(const Fd &socket) {
  sockaddr_storage peer;
  socklen_t length = sizeof peer;
  return ::getpeername(socket.get(), reinterpret_cast<sockaddr *>(&peer), &length) == 0;
}

}  // namespace

Endpoint::Endpoint(const sockaddr_in &address) noexcept : length_(sizeof address) {
  std::memcpy(&storage_, &address, sizeof address);
}

Endpoint::Endpoint(const sockaddr *address) noexcept
    : length_(address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)) {
  std::memcpy(&storage_, address, length_);
  set_port(0);
}

std::vector<Endpoint> Endpoint::resolve(const std::string &host, uint16_t port, std::string &problem, bool *temporary) {
  return look_up(host, port, 0, problem, temporary);
}

std::vector<Endpoint> Endpoint::numeric(const std::string &host, uint16_t port, std::string &problem) {
  if (const auto usual = ipv4(host.c_str(), port)) return {*usual};
  return look_up(host, port, AI_NUMERICHOST, problem);
}

std::optional<Endpoint> Endpoint::ipv4(const char *host, uint16_t port) noexcept {
  sockaddr_in address{};
  if (::inet_pton(AF_INET, host, &address.sin_addr) != 1) return {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  return Endpoint(address);
}

std::vector<Endpoint> Endpoint::look_up(const std::string &host, uint16_t port, int flags, std::string &problem,
                                        bool *temporary) {
  addrinfo hints{};
  hints.ai_flags = flags | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo *list = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  std::vector<Endpoint> found;
  if (code != 0) {
    problem = code == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(code);
    if (temporary) *temporary = code == EAI_AGAIN || code == EAI_MEMORY || code == EAI_SYSTEM;
    return found;
  }
  for (const addrinfo *entry = list; entry; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    found.emplace_back();
    std::memcpy(&found.back().storage_, entry->ai_addr, entry->ai_addrlen);
    found.back().length_ = entry->ai_addrlen;
  }
  ::freeaddrinfo(list);
  if (found.empty()) problem = "no IPv4 or IPv6 address";
  return found;
}

template <class Ask>
Endpoint Endpoint::end_of(Ask &&ask) {
  Endpoint end;
  end.length_ = sizeof end.storage_;
  if (ask(reinterpret_cast<sockaddr *>(&end.storage_), &end.length_) != 0) return {};
  end.length_ = std::min<socklen_t>(end.length_, sizeof end.storage_);
  return end;
}

Endpoint Endpoint::local(const Fd &socket) {
  return end_of([&](sockaddr *address, socklen_t *length) { return ::getsockname(socket.get(), address, length); });
}

Endpoint Endpoint::peer(const Fd &socket) {
  return end_of([&](sockaddr *address, socklen_t *length) { return ::getpeername(socket.get(), address, length); });
}

uint16_t Endpoint::port() const noexcept {  // in the same place for both families
  return ntohs(reinterpret_cast<const sockaddr_in *>(&storage_)->sin_port);
}

void Endpoint::set_port(uint16_t port) noexcept { reinterpret_cast<sockaddr_in *>(&storage_)->sin_port = htons(port); }

bool Endpoint::loopback() const noexcept {
  if (family() == AF_INET) return ntohl(reinterpret_cast<const sockaddr_in *>(&storage_)->sin_addr.s_addr) >> 24 == 127;
  return family() == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6 *>(&storage_)->sin6_addr);
}

std::string Endpoint::address() const {
  char text[NI_MAXHOST];
  if (::getnameinfo(get(), length_, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "no address";
  return text;
}

std::string Endpoint::text() const {
  return family() == AF_INET6 ? format_text("[{}]:{}", address(), port()) : format_text("{}:{}", address(), port());
}

std::string Endpoint::name() const {
  if (family() == AF_UNIX) return "a process of this host";
  return length() ? text() : "a process that has gone";
}

Endpoint parse_address(const std::string &address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon), problem = "it has no port";
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const unsigned long port = colon == address.npos ? 0 : std::strtoul(address.c_str() + colon + 1, nullptr, 10);
  if (port > 0 && port < 65536)
    if (const auto usual = Endpoint::ipv4(host.c_str(), static_cast<uint16_t>(port))) return *usual;
  std::vector<Endpoint> found;
  if (port > 0 && port < 65536) found = Endpoint::numeric(host, static_cast<uint16_t>(port), problem);
  if (found.empty()) fail(FSDP_INVALID_ARGUMENT, "the address '{}' of another rank: {}", address, problem);
  return found.front();
}

bool is_address(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == text.npos) return false;
  const char *end = text.data() + text.size();
  uint16_t port = 0;
  const auto [rest, problem] = std::from_chars(text.data() + colon + 1, end, port);
  if (problem != std::errc() || rest != end || port == 0) return false;
  char host[INET_ADDRSTRLEN] = {};
  if (colon < sizeof host && text.copy(host, colon) && Endpoint::ipv4(host, port)) return true;
  try {
    parse_address(std::string(text));
    return true;
  } catch (const Error &) {
    return false;
  }
}

Fd listen_at(const Endpoint &at, int backlog) {
  Fd socket = make_socket(at.family());
  if (!socket) return socket;
  // Connections of an earlier job may still be in TIME_WAIT. The flag is not set for a port that the kernel chooses:
  // the kernel would then search only half of the ports, one by one, which takes milliseconds on a host with thousands
  // of listeners.
  if (at.port()) set_flag(socket, SOL_SOCKET, SO_REUSEADDR);
  if (::bind(socket.get(), at.get(), at.length()) == 0 && ::listen(socket.get(), backlog) == 0) return socket;
  const int code = errno;
  socket.reset();
  errno = code;
  return socket;
}

Fd accept_from(const Fd &listener) {
  Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) set_flag(socket, IPPROTO_TCP, TCP_NODELAY);
  return socket;
}

void notice_silence(const Fd &socket, uint32_t ms) noexcept {
  constexpr int probes = 3;
  constexpr uint32_t least = 8000;  // a lower bound, because some packets may be lost
  ms = std::max(ms, least);
  const int seconds = std::max<int>(1, static_cast<int>(ms / 1000 / (probes + 1))), unsent = static_cast<int>(ms);
  set_flag(socket, SOL_SOCKET, SO_KEEPALIVE);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unsent, sizeof unsent);
}

Fd begin_connecting(const Endpoint &to, int &code) {
  Fd socket = make_socket(to.family());
  code = socket ? 0 : errno;
  if (socket && ::connect(socket.get(), to.get(), to.length()) != 0) code = errno == EINTR ? EINPROGRESS : errno;
  return socket;
}

int connecting_result(const Fd &socket, const Endpoint &to) {
  if (const int code = pending_error(socket)) return code;
  if (!connected(socket)) return EINPROGRESS;
  // A socket may connect to itself, through a port of this host at which no process listens.
  if (Endpoint::local(socket).text() == to.text()) return ECONNREFUSED;
  set_flag(socket, IPPROTO_TCP, TCP_NODELAY);
  return 0;
}

Fd connect_to(const Endpoint &to, const Limit &limit, std::string &problem) {
  int code = 0;
  Fd socket = begin_connecting(to, code);
  if (!socket) fail_errno(code, "a socket for a connection between ranks");
  if (code == 0) code = connecting_result(socket, to);
  while (code == EINPROGRESS) {
    if (limit.over()) {
      problem = format_text("{} does not answer", to.text());
      socket.reset();
      errno = ETIMEDOUT;
      return {};
    }
    limit.waiter.poll();
    await_room(socket, limit.look_ms);
    code = connecting_result(socket, to);
  }
  if (code != 0) {
    problem = format_text("{}: {}", to.text(), std::strerror(code));
    socket.reset();
    errno = code;
    return {};
  }
  return socket;
}

}  // namespace fsdp::membership
