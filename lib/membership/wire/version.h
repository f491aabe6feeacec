// SPDX-License-Identifier: Apache-2.0
// The version that all ranks of a job must share: they exchange memory and messages in forms that only it knows.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace fsdp::membership {

// Raised with every change, anywhere in the library, to what ranks of different processes exchange.
constexpr uint32_t wire_version = 9;
constexpr const char *library_version = FSDP_VERSION_TEXT;

// Empty, or why rank `rank` with these versions cannot be in a job whose rank `host` has this library.
inline std::string compare_versions(uint32_t rank, uint32_t wire, const std::string &library, uint32_t host) {
  if (wire == wire_version && library == library_version) return {};
  return format_text(
      "rank {} has libfsdp {} (wire format {}), rank {} has libfsdp {} (wire format {}): all ranks of a job "
      "need the same",
      rank, library, wire, host, library_version, wire_version);
}

}  // namespace fsdp::membership
