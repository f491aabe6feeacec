// SPDX-License-Identifier: Apache-2.0
// Proof of knowledge of the job secret. The secret itself never leaves the process and is never part of a message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::membership {

using Digest = std::array<uint8_t, 32>;
using Nonce = std::array<uint8_t, 32>;

// A text that stays in memory as long as a job runs, in pages of its own, which copies share. Core dumps omit the pages
// if the kernel allows that, and the pages are wiped when the last copy ends.
class Secret {
 public:
  Secret() = default;
  Secret(std::string_view text);
  Secret(const std::string &text) : Secret(std::string_view(text)) {}
  Secret(const char *text) : Secret(std::string_view(text)) {}
  operator std::string_view() const noexcept;
  bool empty() const noexcept { return std::string_view(*this).empty(); }

 private:
  class Pages;
  std::shared_ptr<const Pages> pages_;
};

// Wipes the contents of a string when the scope ends.
class WipedText {
 public:
  explicit WipedText(std::string &text) : text_(text) {}
  ~WipedText();
  WipedText(const WipedText &) = delete;
  WipedText &operator=(const WipedText &) = delete;

 private:
  std::string &text_;
};

Nonce make_nonce();
// HMAC-SHA256 over the label and the parts, each of fixed length.
Digest authenticate(std::string_view secret, std::string_view label,
                    std::initializer_list<std::span<const uint8_t>> parts);
// HKDF-SHA256 (RFC 5869): a key for one use of the secret.
Digest derive_key(std::string_view secret, std::span<const uint8_t> salt, std::string_view use);
// The keys of one connection, one for the frames of each direction. Wiped when the object ends.
struct StreamKeys {
  Digest out{}, in{};
  ~StreamKeys();
};
// SHA-256.
Digest digest_of(std::span<const std::byte> bytes);
// HMAC-SHA256 of the n-th frame of a direction: its number, its head and the digest of its body.
Digest tag_of(const Digest &key, uint64_t number, std::span<const std::byte, 16> head, const Digest &body);
// Compares in constant time.
bool equal(const Digest &a, const Digest &b) noexcept;

// The name of the abstract socket, without the leading NUL. A process that does not know the secret cannot derive the
// name of a job's rendezvous, and so cannot listen at it first.
std::string socket_name(const std::string &rendezvous, std::string_view secret, uint32_t user);

}  // namespace fsdp::membership
