// SPDX-License-Identifier: Apache-2.0
// Included before all else in the units of leader_fuzzer. The fuzzer sets the leader's clock, so that nothing waits.
// Digests are cheap ones, because otherwise libcrypto would take two thirds of the time; the fuzzer knows the secret
// anyway.
#pragma once

#include <openssl/hmac.h>
#include <openssl/sha.h>

#define steady_ms real_steady_ms
#include "base/failure.h"
#undef steady_ms

namespace fsdp {

uint64_t steady_ms() noexcept;

}  // namespace fsdp

unsigned char *cheap_hmac(const EVP_MD *, const void *key, int key_bytes, const unsigned char *data, size_t bytes,
                          unsigned char *digest, unsigned int *digest_bytes);
unsigned char *cheap_sha256(const unsigned char *data, size_t bytes, unsigned char *digest);
#define HMAC cheap_hmac
#define SHA256 cheap_sha256
