// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli's polynomial, as in iSCSI: RFC 3720, B.4), computed by the processor's instruction if it has one.
#pragma once

#include <cstdint>

namespace fsdp {

// `crc` is 0 or the CRC of the preceding bytes: crc32c(crc32c(0, a), b) is the CRC of a followed by b.
uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes) noexcept;
// Computes the same CRC without the instruction.
uint32_t crc32c_by_table(uint32_t crc, const void *data, uint64_t bytes) noexcept;

}  // namespace fsdp
