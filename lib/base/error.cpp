// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include "base/failure.h"

#include <atomic>
#include <cerrno>
#include <system_error>

namespace fsdp {

uint64_t thread_number() noexcept {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t number = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return number;
}

std::string vformat_text(fmt::string_view format, fmt::format_args args) { return fmt::vformat(format, args); }

void fail_errno(int code, const std::string &what) {
  const auto status = code == ENOMEM ? FSDP_OUT_OF_MEMORY : FSDP_SYSTEM;
  throw Error(status, format_text("{}: {}", what, std::generic_category().message(code)), -1, FSDP_ORIGIN_OS, code);
}

}  // namespace fsdp
