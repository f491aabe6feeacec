// SPDX-License-Identifier: Apache-2.0
// Proof of knowledge of the job secret. The secret itself never leaves the process and never reaches a message.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::comm {

using Digest = std::array<uint8_t, 32>;
using Nonce = std::array<uint8_t, 32>;

Nonce make_nonce();
// HMAC-SHA256 over the label and the parts, each of fixed length.
Digest authenticate(const std::string &secret, std::string_view label,
                    std::initializer_list<std::span<const uint8_t>> parts);
// HKDF-SHA256 (RFC 5869): a key for one use of the secret.
Digest derive_key(const std::string &secret, std::span<const uint8_t> salt, std::string_view use);
// In constant time.
bool equal(const Digest &a, const Digest &b) noexcept;

// The name of the abstract socket, the leading NUL not included: who does not know the secret cannot tell where a job
// will meet, and so cannot sit there first.
std::string socket_name(const std::string &rendezvous, const std::string &secret, uint32_t user);

}  // namespace fsdp::comm
