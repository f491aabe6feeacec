// SPDX-License-Identifier: Apache-2.0
// Single elements of a dtype, for tests that know nothing of the library's own conversions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdp.h"

namespace harness {

float load_element(const void *data, fsdp_dtype dtype, uint64_t i);
void store_element(void *data, fsdp_dtype dtype, uint64_t i, float value);
float round_to(float value, fsdp_dtype dtype);  // to nearest, ties to even

// The CRC-32 of zlib.
uint32_t crc32(const void *data, size_t bytes);

}  // namespace harness
