// SPDX-License-Identifier: Apache-2.0
#include "membership/wire/secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace fsdp::membership {
namespace {

// Wipes bytes that depend on the secret before their memory is used again.
class Wiped {
 public:
  Wiped(void *data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~Wiped() { ::explicit_bzero(data_, bytes_); }
  Wiped(const Wiped &) = delete;
  Wiped &operator=(const Wiped &) = delete;

 private:
  void *data_;
  size_t bytes_;
};

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t *>(text.data()), text.size()};
}

// Threads of the library may be inside libcrypto while the program ends, so libcrypto must not clean up at exit. Its
// first user in the process decides that: if the program used it first, its cleanup stays.
void keep_libcrypto() noexcept {
  static const int kept = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  (void)kept;
}

Digest hmac(std::span<const uint8_t> key, std::span<const uint8_t> message) {
  keep_libcrypto();
  Digest digest;
  unsigned length = 0;
  constexpr uint8_t none = 0;  // HMAC does not take NULL for an empty key
  if (!HMAC(EVP_sha256(), key.empty() ? &none : key.data(), static_cast<int>(key.size()), message.data(),
            message.size(), digest.data(), &length) ||
      length != digest.size())
    fail(FSDP_SYSTEM, "HMAC-SHA256 of the bootstrap failed in libcrypto");
  return digest;
}

}  // namespace

class Secret::Pages {
 public:
  explicit Pages(std::string_view text) : bytes_(text.size()) {
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) fail_errno(errno, "memory for the job secret");
    ::madvise(data_, bytes_, MADV_DONTDUMP);  // if the kernel refuses, core dumps have the secret (SECURITY.md)
    std::memcpy(data_, text.data(), bytes_);
  }
  ~Pages() {
    ::explicit_bzero(data_, bytes_);
    ::munmap(data_, bytes_);
  }
  Pages(const Pages &) = delete;
  Pages &operator=(const Pages &) = delete;
  std::string_view text() const noexcept { return {static_cast<const char *>(data_), bytes_}; }

 private:
  void *data_;
  size_t bytes_;
};

Secret::Secret(std::string_view text) {
  if (!text.empty()) pages_ = std::make_shared<const Pages>(text);
}

Secret::operator std::string_view() const noexcept { return pages_ ? pages_->text() : std::string_view(); }

WipedText::~WipedText() { ::explicit_bzero(text_.data(), text_.size()); }

namespace {

// For a rank that may not call getrandom. check_kernel() refuses that rank, but the rank needs a nonce to tell the
// others over a proven connection.
Nonce read_nonce() {
  Nonce nonce;
  const Fd file(::open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  const ssize_t got = file ? ::read(file.get(), nonce.data(), nonce.size()) : -1;
  if (got < 0) fail_errno(errno, "getrandom is denied, and /dev/urandom");
  if (got < static_cast<ssize_t>(nonce.size())) fail(FSDP_SYSTEM, "/dev/urandom has given {} bytes", got);
  return nonce;
}

}  // namespace

Nonce make_nonce() {
  Nonce nonce;
  size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t got = ::getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (got > 0) {
      have += static_cast<size_t>(got);
    } else if (errno == ENOSYS || errno == EPERM) {
      return read_nonce();
    } else if (errno != EINTR) {
      fail_errno(errno, "getrandom for the bootstrap");
    }
  }
  return nonce;
}

Digest authenticate(std::string_view secret, std::string_view label,
                    std::initializer_list<std::span<const uint8_t>> parts) {
  std::vector<uint8_t> message(label.begin(), label.end());
  message.push_back(0);  // ends the label, so that no label is the start of another
  for (const auto part : parts) message.insert(message.end(), part.begin(), part.end());
  return hmac(bytes_of(secret), message);
}

// Extracts, and then makes the first block of the expansion, which has the length of the key.
Digest derive_key(std::string_view secret, std::span<const uint8_t> salt, std::string_view use) {
  std::vector<uint8_t> block(use.begin(), use.end());
  block.push_back(1);
  Digest extracted = hmac(salt, bytes_of(secret));
  const Wiped wiped(extracted.data(), extracted.size());
  return hmac(extracted, block);
}

StreamKeys::~StreamKeys() {
  ::explicit_bzero(out.data(), out.size());
  ::explicit_bzero(in.data(), in.size());
}

Digest digest_of(std::span<const std::byte> bytes) {
  keep_libcrypto();
  Digest digest;
  if (!SHA256(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), digest.data()))
    fail(FSDP_SYSTEM, "SHA256 of the bootstrap failed in libcrypto");
  return digest;
}

Digest tag_of(const Digest &key, uint64_t number, std::span<const std::byte, 16> head, const Digest &body) {
  std::array<uint8_t, sizeof number + head.size() + sizeof body> said;
  std::memcpy(said.data(), &number, sizeof number);
  std::memcpy(said.data() + sizeof number, head.data(), head.size());
  std::memcpy(said.data() + sizeof number + head.size(), body.data(), sizeof body);
  return hmac(key, said);
}

bool equal(const Digest &a, const Digest &b) noexcept { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

std::string socket_name(const std::string &rendezvous, std::string_view secret, uint32_t user) {
  const std::string subject = format_text("{}:{}", user, rendezvous);
  const auto *bytes = reinterpret_cast<const uint8_t *>(subject.data());
  const Digest digest = authenticate(secret, "libfsdp rendezvous", {{bytes, subject.size()}});
  std::string name = "fsdp-";
  for (size_t i = 0; i < 16; ++i) name += format_text("{:02x}", digest[i]);
  return name;
}

}  // namespace fsdp::membership
