// SPDX-License-Identifier: Apache-2.0
// A numeric TCP address and port, IPv4 or IPv6. Sockets made here never block and are closed on exec.
#pragma once

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/failure.h"
#include "base/fd.h"

namespace fsdp::membership {

// The limit of a wait, the waiter that may end it sooner, and the period at which the wait polls that waiter.
struct Limit {
  std::chrono::steady_clock::time_point deadline;
  const Waiter &waiter;
  int look_ms = slice_ms;
  bool over() const { return std::chrono::steady_clock::now() >= deadline; }
};

class Endpoint {
 public:
  Endpoint() = default;
  explicit Endpoint(const sockaddr_in &address) noexcept;
  // `address`: IPv4 or IPv6. The port becomes 0.
  explicit Endpoint(const sockaddr *address) noexcept;
  // The addresses of a host's name, or a numeric address. Returns nothing, and sets `problem`, if there is none. For a
  // name it may take as long as the name service takes: see NameLookup. `temporary`: set if another try may succeed.
  static std::vector<Endpoint> resolve(const std::string &host, uint16_t port, std::string &problem,
                                       bool *temporary = nullptr);
  // A numeric address, without a name service.
  static std::vector<Endpoint> numeric(const std::string &host, uint16_t port, std::string &problem);
  // The usual case, without an allocation, because a rank of a large job reads the addresses of all ranks.
  static std::optional<Endpoint> ipv4(const char *host, uint16_t port) noexcept;
  // The two ends of a connected socket. The family is 0 if the kernel does not tell.
  static Endpoint local(const Fd &socket);
  static Endpoint peer(const Fd &socket);

  const sockaddr *get() const noexcept { return reinterpret_cast<const sockaddr *>(&storage_); }
  socklen_t length() const noexcept { return length_; }
  int family() const noexcept { return storage_.sin6_family; }
  uint16_t port() const noexcept;
  void set_port(uint16_t port) noexcept;
  bool loopback() const noexcept;
  std::string address() const;  // "10.0.0.1"
  std::string text() const;     // "10.0.0.1:29500", "[::1]:29500"
  // The text, or a description if the other end of a connection has no numeric address.
  std::string name() const;

 private:
  static std::vector<Endpoint> look_up(const std::string &host, uint16_t port, int flags, std::string &problem,
                                       bool *temporary = nullptr);
  // Only the family is kept of an address that is neither IPv4 nor IPv6.
  template <class Ask>
  static Endpoint end_of(Ask &&ask);

  sockaddr_in6 storage_{};  // has room for either family; small, because a rank keeps the addresses of all others
  socklen_t length_ = 0;
};

// Splits "10.0.0.1:29500" or "[::1]:29500". Throws INVALID_ARGUMENT.
Endpoint parse_address(const std::string &address);
// Would parse_address accept the text? For IPv4 without an allocation.
bool is_address(std::string_view text);

// Listens only at the interface of this address. With port 0 the kernel chooses a port, which Endpoint::local returns.
// Returns an empty Fd, and sets errno, if it cannot listen.
Fd listen_at(const Endpoint &at, int backlog);
// Accepts a waiting connection. Returns an empty Fd, and sets errno, if there is none.
Fd accept_from(const Fd &listener);
// Makes a connected socket end after about `ms` if the other host has vanished, even if nothing is sent. (The end of a
// process is noticed immediately.)
void notice_silence(const Fd &socket, uint32_t ms) noexcept;
// Returns a socket that is connecting or connected (see connecting_result). `code`: 0, EINPROGRESS, or the error.
Fd begin_connecting(const Endpoint &to, int &code);
// Returns 0 if the socket is connected, EINPROGRESS while it is not, or the error.
int connecting_result(const Fd &socket, const Endpoint &to);
// Returns an empty Fd, and sets `problem` and errno, if no process listens there or no answer arrives before the limit.
Fd connect_to(const Endpoint &to, const Limit &limit, std::string &problem);

// A listener stays readable if its connections cannot be accepted for lack of descriptors, and polling it would spin.
// AcceptPause tells how long to leave it alone.

class AcceptPause {
 public:
  using Clock = std::chrono::steady_clock;
  bool over() const { return Clock::now() >= until_; }
  // Notes that accept has failed with this errno. Returns true if the caller must pause.
  bool note(int code) {
    if (code != EMFILE && code != ENFILE && code != ENOBUFS && code != ENOMEM) return false;
    const auto now = Clock::now();
    if (code_ == 0) since_ = now;
    code_ = code;
    until_ = now + std::chrono::milliseconds(100);
    return true;
  }
  void clear() { code_ = 0; }
  // Have accepts failed for at least this time?
  bool lasts(Clock::duration time) const { return code_ != 0 && Clock::now() - since_ >= time; }
  // "too many open files: this process may have 1024 (see ulimit -n)"; empty if nothing was wrong.
  std::string problem() const {
    if (code_ == 0) return {};
    rlimit limit{};
    if (code_ != EMFILE || ::getrlimit(RLIMIT_NOFILE, &limit) != 0)
      return code_ == ENFILE ? "too many open files on this host (see /proc/sys/fs/file-max)" : "no memory for sockets";
    return format_text("too many open files: this process may have {} (see ulimit -n)", limit.rlim_cur);
  }

 private:
  Clock::time_point until_{}, since_{};
  int code_ = 0;
};

}  // namespace fsdp::membership
