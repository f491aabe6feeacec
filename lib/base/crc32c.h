// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli's polynomial, as of iSCSI: RFC 3720, B.4), by the processor's instruction where it has one.
#pragma once

#include <cstdint>

namespace fsdp {

// crc: 0, or of what came before. crc32c(crc32c(0, a), b) is that of a and b.
uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes) noexcept;
// The same without the instruction.
uint32_t crc32c_by_table(uint32_t crc, const void *data, uint64_t bytes) noexcept;

}  // namespace fsdp
