// SPDX-License-Identifier: Apache-2.0
// The file that FSDP_JOB_SECRET_FILE names.
#pragma once

#include <string>

namespace fsdp::membership {

// Its text, without line ends at the end. Throws INVALID_ARGUMENT unless it is a regular file of the user's or root's
// that no other user may read or write (a group of this process may read it), and has 1 to 4,096 bytes. A symbolic link
// is followed if it and its folder belong to the user or root, and no other user may change it. Never waits.
std::string read_secret_file(const std::string &path);

}  // namespace fsdp::membership
