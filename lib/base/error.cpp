// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace fsdp {

std::string vformat_text(fmt::string_view format, fmt::format_args args) { return fmt::vformat(format, args); }

void fail_errno(int code, const std::string &what) {
  const auto status = code == ENOMEM ? FSDP_OUT_OF_MEMORY : FSDP_SYSTEM;
  throw Error(status, format_text("{}: {}", what, std::generic_category().message(code)), -1, FSDP_ORIGIN_OS, code);
}

}  // namespace fsdp
