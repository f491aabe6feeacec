// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <system_error>

namespace run {

// A system call has failed: what was being done, with errno's text.
[[noreturn]] inline void fail(const char *what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace run
