// SPDX-License-Identifier: Apache-2.0

#include "transport/message/tcp/tls.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/settings.h"

namespace fsdp::transport::tcp {

namespace {

template <class Function>
void find_function(void *library, const char *path, const char *name, Function &function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function)
    fail(FSDP_UNSUPPORTED, "FSDP_NET_ENCRYPTION=on: {} has no {}: libssl of OpenSSL 3.0 or later is needed", path,
         name);
}

}  // namespace

TlsLibrary load_tls_library() {
  const char *named = setting("FSDP_SSL_LIBRARY");
  const char *path = named && *named ? named : "libssl.so.3";
  void *library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    const char *why = ::dlerror();
    fail(FSDP_UNSUPPORTED,
         "FSDP_NET_ENCRYPTION=on needs OpenSSL's libssl: {}; install it (Debian: libssl3), or name it in "
         "FSDP_SSL_LIBRARY",
         why ? why : path);
  }
  TlsLibrary found;
#define FSDP_TLS_FIND(name) find_function(library, path, #name, found.name);
  FSDP_TLS_FUNCTIONS(FSDP_TLS_FIND)
#undef FSDP_TLS_FIND
  unsigned long (*version)() = nullptr;
  find_function(library, path, "OpenSSL_version_num", version);
  if (version() < 0x30000000UL)
    fail(FSDP_UNSUPPORTED, "FSDP_NET_ENCRYPTION=on: {} is of OpenSSL {:x}: 3.0 or later is needed", path, version());
  // libssl's cleanup at exit must not run, because exit() does not wait for threads, and the library's thread may be
  // inside libssl.
  if (found.OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr) != 1)
    fail(FSDP_SYSTEM, "FSDP_NET_ENCRYPTION=on: {} cannot be set up", path);
  return found;
}

namespace {

constexpr size_t max_taken_at_once = size_t{64} << 10;
constexpr size_t read_at_once = size_t{32} << 10;
constexpr size_t record_bytes = 16384, record_overhead = 64;  // upper bound of the bytes beside the payload
constexpr const char *cipher_name = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char cipher_id[] = {0x13, 0x01};
constexpr std::string_view export_label = "EXPORTER-libfsdp-messages";
constexpr int refresh_keys = 0;  // SSL_KEY_UPDATE_NOT_REQUESTED: updates only this direction's key
// A global pointer, because libssl's callbacks get no argument that leads to the TlsLibrary.
std::atomic<decltype(TlsLibrary::SSL_get_ex_data)> get_data{nullptr};

}  // namespace

// Functions that libssl calls during a handshake.
struct Tls::Callbacks {
  static Tls &self(SSL *ssl) noexcept { return *static_cast<Tls *>(get_data.load()(ssl, 0)); }

  // For the listening end. No other identity is accepted.
  static int find_session(SSL *ssl, const unsigned char *identity, size_t bytes, SSL_SESSION **session) noexcept {
    const Tls &tls = self(ssl);
    const std::string_view named(reinterpret_cast<const char *>(identity), bytes);
    *session = named == tls.identity_ ? tls.make_session() : nullptr;
    return *session != nullptr;
  }

  // For the connecting end.
  static int use_session(SSL *ssl, const EVP_MD *, const unsigned char **identity, size_t *bytes,
                         SSL_SESSION **session) noexcept {
    const Tls &tls = self(ssl);
    *identity = reinterpret_cast<const unsigned char *>(tls.identity_.data());
    *bytes = tls.identity_.size();
    *session = tls.make_session();
    return *session != nullptr;
  }
};

Tls::Tls(const TlsLibrary &library, Role role, const Digest &key, std::string identity, uint64_t key_bytes)
    : library_(library),
      role_(role),
      key_(key),
      identity_(std::move(identity)),
      key_bytes_(key_bytes),
      context_(library.SSL_CTX_new(library.TLS_method()), library.SSL_CTX_free),
      ssl_(nullptr, library.SSL_free) {
  const auto check = [](bool right) {
    if (!right) fail(FSDP_SYSTEM, "TLS for messages: libssl cannot be set up");
  };
  get_data.store(library.SSL_get_ex_data);
  check(context_ != nullptr);
  SSL_CTX *context = context_.get();
  check(library.SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1 &&
        library.SSL_CTX_set_ciphersuites(context, cipher_name) == 1 &&
        library.SSL_CTX_set_num_tickets(context, 0) == 1);
  // Cleared because the system's configuration may allow keys that depend only on the secret.
  library.SSL_CTX_clear_options(context, SSL_OP_ALLOW_NO_DHE_KEX);
  library.SSL_CTX_set_psk_find_session_callback(context, Callbacks::find_session);
  library.SSL_CTX_set_psk_use_session_callback(context, Callbacks::use_session);
  ssl_.reset(library.SSL_new(context));
  in_ = library.BIO_new(library.BIO_s_mem());
  to_go_ = library.BIO_new(library.BIO_s_mem());
  check(ssl_ && in_ && to_go_ && library.SSL_set_ex_data(ssl_.get(), 0, this) == 1);
  library.SSL_set_bio(ssl_.get(), in_, to_go_);
  (role == Role::host ? library.SSL_set_accept_state : library.SSL_set_connect_state)(ssl_.get());
}

Tls::~Tls() { ::explicit_bzero(key_.data(), key_.size()); }

// Returns the key as a session of TLS 1.3 that both ends can resume, or NULL if there is no memory.
SSL_SESSION *Tls::make_session() const noexcept {
  SSL_SESSION *session = library_.SSL_SESSION_new();
  const SSL_CIPHER *cipher = library_.SSL_CIPHER_find(ssl_.get(), cipher_id);
  if (session && cipher && library_.SSL_SESSION_set1_master_key(session, key_.data(), key_.size()) == 1 &&
      library_.SSL_SESSION_set_cipher(session, cipher) == 1 &&
      library_.SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
    return session;
  library_.SSL_SESSION_free(session);
  return nullptr;
}

// libssl's text for the last call that failed.
std::string Tls::reason() const {
  const char *reason = library_.ERR_reason_error_string(library_.ERR_get_error());
  return format_text("TLS: {}", reason ? reason : "it cannot go on");
}

// The code is set first, because there may be no memory for the text.
void Tls::note_problem(int code) {
  if (code_) return;
  code_ = code;
  problem_ = reason();
}

// ---- the socket ----

// Sends as many records as the socket accepts. Returns false, and sets errno, if not all were sent.
bool Tls::flush(const Fd &socket) {
  if (const size_t made = library_.BIO_ctrl_pending(to_go_)) {
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(gone_));
    gone_ = 0;
    const size_t before = out_.size();
    out_.resize(before + made);
    library_.BIO_read(to_go_, out_.data() + before, static_cast<int>(made));
  }
  while (unsent()) {
    const ssize_t count = ::send(socket.get(), out_.data() + gone_, out_.size() - gone_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    gone_ += static_cast<size_t>(count);
  }
  out_.clear();
  gone_ = 0;
  return true;
}

// Reads the socket once, and returns the result of recv. If there is no memory for the bytes, they are lost, so the
// connection then ends.
ssize_t Tls::fill(const Fd &socket) {
  std::byte bytes[read_at_once];
  ssize_t count;
  do {
    count = ::recv(socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count <= 0) return count;
  if (library_.BIO_write(in_, bytes, static_cast<int>(count)) != count) {
    code_ = ENOMEM;
    problem_ = "TLS: there is no memory for what came";
    errno = code_;
    return -1;
  }
  more_ = true;
  return count;
}

// ---- the handshake ----

IoState Tls::shake_hands(const Fd &socket) {
  for (;;) {
    library_.ERR_clear_error();
    const int result = library_.SSL_do_handshake(ssl_.get());
    const bool waits = result != 1 && library_.SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ;
    if (result != 1 && !waits) note_problem(EPROTO);
    const bool gone = flush(socket);  // sends an alert, too
    if (code_) return IoState::failed;
    if (!gone && errno != EAGAIN) return fail_handshake(std::strerror(errno));
    if (!waits && !library_.SSL_session_reused(ssl_.get())) return fail_without_key();
    if (!waits) return gone ? IoState::done : IoState::waiting;
    const ssize_t count = fill(socket);
    if (count > 0) continue;
    if (count < 0 && errno == EAGAIN) return IoState::waiting;
    return fail_handshake(count == 0 ? "the other end hung up" : std::strerror(errno));
  }
}

IoState Tls::fail_handshake(const char *why) {
  problem_ = format_text("TLS: {}", why);
  hung_up_ = true;
  return IoState::failed;
}

// Without certificates the handshake cannot succeed without the key, but this library also checks it.
IoState Tls::fail_without_key() {
  code_ = EPROTO;
  problem_ = "TLS: the handshake has not used the key that both ends have beforehand";
  return IoState::failed;
}

Digest Tls::exported() const {
  Digest value;
  if (library_.SSL_export_keying_material(ssl_.get(), value.data(), value.size(), export_label.data(),
                                          export_label.size(), nullptr, 0, 0) != 1)
    fail(FSDP_SYSTEM, "TLS for messages: libssl exports no value");
  return value;
}

// ---- bytes ----

// Nothing may throw once libssl has accepted bytes, because the caller would then send them again.
ssize_t Tls::send(const Fd &socket, const iovec *parts, size_t count) {
  if (!flush(socket)) return -1;
  out_.reserve(max_taken_at_once + (max_taken_at_once / record_bytes + count + 1) * record_overhead);
  size_t taken = 0;
  for (size_t i = 0; i < count && taken < max_taken_at_once; ++i) {
    const size_t bytes = std::min(parts[i].iov_len, max_taken_at_once - taken);
    size_t written = 0;
    library_.ERR_clear_error();
    if (bytes > 0 && library_.SSL_write_ex(ssl_.get(), parts[i].iov_base, bytes, &written) != 1) {
      write_problem_ = reason();
      errno = EPROTO;
      return -1;
    }
    taken += bytes;
  }
  since_key_ += taken;
  if (since_key_ >= key_bytes_ && library_.SSL_key_update(ssl_.get(), refresh_keys) == 1) {
    since_key_ = 0;
    ++key_updates_;
  }
  flush(socket);  // the next call finds an error
  return static_cast<ssize_t>(taken);
}

// Returns false if there are no more bytes, or if reading has failed.
bool Tls::take(std::byte *to, size_t bytes, size_t &got) {
  library_.ERR_clear_error();
  const int result = library_.SSL_read_ex(ssl_.get(), to, bytes, &got);
  if (result == 1) return true;
  more_ = false;
  const int why = library_.SSL_get_error(ssl_.get(), result);
  if (why == SSL_ERROR_ZERO_RETURN) ended_ = true;
  if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_ZERO_RETURN) note_problem(EBADMSG);
  return false;
}

ssize_t Tls::receive(const Fd &socket, const iovec *parts, size_t count) {
  size_t total = 0;
  if (!has_more()) {
    const ssize_t filled = fill(socket);
    if (filled <= 0) return filled;
  }
  for (size_t i = 0; i < count && more_; ++i)
    for (size_t at = 0, got = 0; at < parts[i].iov_len; at += got, total += got)
      if (!take(static_cast<std::byte *>(parts[i].iov_base) + at, parts[i].iov_len - at, got)) break;
  if (total > 0) return static_cast<ssize_t>(total);  // the next call finds a later error
  if (ended_) return 0;
  errno = code_ ? code_ : EAGAIN;
  return -1;
}

}  // namespace fsdp::transport::tcp
