// SPDX-License-Identifier: Apache-2.0
// Reads the file that FSDP_JOB_SECRET_FILE names.
#pragma once

#include <string>

namespace fsdp::membership {

// The text of the file, without line ends at its end. Throws INVALID_ARGUMENT unless it is a regular file of 1 to 4,096
// bytes that belongs to the user or root. No other user may be able to read or write the file, but a group of this
// process may be able to read it. A symbolic link is followed only if it and its folder belong to the user or root, and
// no other user can change it. Never waits.
std::string read_secret_file(const std::string &path);

}  // namespace fsdp::membership
