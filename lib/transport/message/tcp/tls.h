// SPDX-License-Identifier: Apache-2.0
// TLS 1.3 over a connected socket, never waiting: both ends have a key beforehand and no certificates, and each
// connection has keys of its own on top (ECDHE), so that who learns the secret later reads nothing recorded.
//
//   out:  frames --> records in memory --> socket     what is sent is read from the caller's memory at once
//   in:   socket --> records in memory --> the caller's memory
//
// Of one thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "membership/wire/proof.h"
#include "transport/message/tcp/tls_library.h"
#include "transport/names.h"

struct iovec;

namespace fsdp::transport::tcp {

class Tls {
 public:
  enum class State { waiting, done, failed };
  // A key of AES-GCM may guard 2^24.5 records, which are 380 GB.
  static constexpr uint64_t usual_key_bytes = uint64_t{64} << 30;

  // Both ends need the same key and identity. key_bytes: this end takes a new key after so many.
  Tls(const TlsLibrary &library, Role role, const Digest &key, std::string identity,
      uint64_t key_bytes = usual_key_bytes);
  ~Tls();
  Tls(const Tls &) = delete;
  Tls &operator=(const Tls &) = delete;

  State shake_hands(const Fd &socket);
  // Of this connection alone, and the same at both ends.
  Digest exported() const;

  // As sendmsg: how many bytes were taken, of at most 64 KiB; -1 and errno (EAGAIN: what was taken before has not
  // gone).
  ssize_t send(const Fd &socket, const iovec *parts, size_t count);
  bool unsent() const noexcept { return gone_ < out_.size(); }
  // As recvmsg; see code().
  ssize_t receive(const Fd &socket, const iovec *parts, size_t count);
  // There may be more in memory, of which the socket knows nothing.
  bool has_more() const noexcept { return more_ || code_ != 0; }
  // Why nothing more is read. EBADMSG: what came is not what was sent; ENOMEM: what came is lost.
  int code() const noexcept { return code_; }
  const std::string &problem() const noexcept { return problem_; }
  // Why nothing more is sent, which says nothing of what comes.
  const std::string &write_problem() const noexcept { return write_problem_; }
  bool hung_up() const noexcept { return hung_up_; }  // it failed by the end of the connection
  uint64_t key_updates() const noexcept { return key_updates_; }

 private:
  struct Callbacks;
  SSL_SESSION *make_session() const noexcept;
  State fail_handshake(const char *why);
  State fail_without_key();
  bool flush(const Fd &socket);
  ssize_t fill(const Fd &socket);
  bool take(std::byte *to, size_t bytes, size_t &got);
  std::string reason() const;
  void note_problem(int code);

  const TlsLibrary &library_;
  Role role_;
  Digest key_;
  std::string identity_;
  uint64_t key_bytes_, since_key_ = 0, key_updates_ = 0;
  std::unique_ptr<SSL_CTX, decltype(TlsLibrary::SSL_CTX_free)> context_;
  std::unique_ptr<SSL, decltype(TlsLibrary::SSL_free)> ssl_;
  BIO *in_ = nullptr, *to_go_ = nullptr;  // ssl_'s
  std::vector<std::byte> out_;            // records on their way
  size_t gone_ = 0;
  bool more_ = false, ended_ = false, hung_up_ = false;
  int code_ = 0;
  std::string problem_, write_problem_;
};

}  // namespace fsdp::transport::tcp
