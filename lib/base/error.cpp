// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace fsdp {

void fail_errno(int code, const std::string &what) {
  const auto status = code == ENOMEM ? FSDP_OUT_OF_MEMORY : FSDP_SYSTEM;
  throw Error(status, fmt::format("{}: {}", what, std::generic_category().message(code)), -1, FSDP_ORIGIN_OS, code);
}

}  // namespace fsdp
