// SPDX-License-Identifier: Apache-2.0
// The file that FSDP_JOB_SECRET_FILE names.
#pragma once

#include <string>

namespace fsdp::comm {

// Its text, without line ends at the end. Throws INVALID_ARGUMENT unless it is a regular file of the user's or root's
// that nobody else may read or write, and has 1 to 4,096 bytes. Never waits.
std::string read_secret_file(const std::string &path);

}  // namespace fsdp::comm
