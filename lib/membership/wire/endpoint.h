// SPDX-License-Identifier: Apache-2.0
// An address and port of TCP, numeric: IPv4 or IPv6. Sockets made here never block and are closed on exec.
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

// How long a wait may take, what may end it before, and how often it looks for that.
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
  // IPv4 or IPv6; its port is 0.
  explicit Endpoint(const sockaddr *address) noexcept;
  // The addresses of a host's name, or the one written as a number. Empty, with `problem` set, if there are none. For a
  // name it may take as long as the name service likes: see NameLookup. temporary: set if another try may find one.
  static std::vector<Endpoint> resolve(const std::string &host, uint16_t port, std::string &problem,
                                       bool *temporary = nullptr);
  // The one written as a number, at once.
  static std::vector<Endpoint> numeric(const std::string &host, uint16_t port, std::string &problem);
  // The usual one, without an allocation: a rank of a large job reads those of all.
  static std::optional<Endpoint> ipv4(const char *host, uint16_t port) noexcept;
  // Ends of a connected socket. An address of no family if the kernel does not say.
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
  // The text, of what is at the other end of a connection also where there is no address.
  std::string name() const;

 private:
  static std::vector<Endpoint> look_up(const std::string &host, uint16_t port, int flags, std::string &problem,
                                       bool *temporary = nullptr);
  // Of another family than these two only that is kept.
  template <class Ask>
  static Endpoint end_of(Ask &&ask);

  sockaddr_in6 storage_{};  // of either family: a rank keeps the addresses of all others
  socklen_t length_ = 0;
};

// Splits "10.0.0.1:29500" or "[::1]:29500". Throws INVALID_ARGUMENT.
Endpoint parse_address(const std::string &address);
// Is it one? Of IPv4 without an allocation.
bool is_address(std::string_view text);

// Listens at the interface of this address only; port 0: one that the kernel chooses (Endpoint::local tells). Empty if
// it cannot: errno says why.
Fd listen_at(const Endpoint &at, int backlog);
// A connection that waits, if there is one; else errno says why not.
Fd accept_from(const Fd &listener);
// The end of a connected socket whose host has vanished is noticed after so long, though nothing is sent. (A process
// that ends is noticed at once.)
void notice_silence(const Fd &socket, uint32_t ms) noexcept;
// A socket that connects, or is connected: connecting_result tells. code: 0, EINPROGRESS or why it does neither.
Fd begin_connecting(const Endpoint &to, int &code);
// 0: connected. EINPROGRESS: not yet. Else why not.
int connecting_result(const Fd &socket, const Endpoint &to);
// Empty, with `problem` and errno set, if no process listens there or no answer has come until the limit.
Fd connect_to(const Endpoint &to, const Limit &limit, std::string &problem);

// A listener whose connections cannot be taken for lack of descriptors stays readable, and polling it would spin. So it
// is left alone for a while.

class AcceptPause {
 public:
  using Clock = std::chrono::steady_clock;
  bool over() const { return Clock::now() >= until_; }
  // accept has failed with this errno. True: it must pause.
  bool note(int code) {
    if (code != EMFILE && code != ENFILE && code != ENOBUFS && code != ENOMEM) return false;
    const auto now = Clock::now();
    if (code_ == 0) since_ = now;
    code_ = code;
    until_ = now + std::chrono::milliseconds(100);
    return true;
  }
  void clear() { code_ = 0; }
  // It has failed all this time.
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
