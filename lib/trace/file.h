// SPDX-License-Identifier: Apache-2.0
// Files that a context writes. Readers see each file complete or not at all, and the files of an earlier context are
// kept.
#pragma once

#include <string>

namespace fsdp::trace {

// Writes a temporary file beside `path`, readable only by this user, and renames it to `path` when it is complete.
// Throws FSDP_SYSTEM with the call, the path and errno, also if `path` exists and is not a regular file. An error
// leaves no temporary file.
void replace_file(const std::string &path, const std::string &text, const char *call);
// Appends the text to the file, in one piece unless the disk is full; creates the file if it does not exist. Throws
// like replace_file().
void append_to_file(const std::string &path, const std::string &text, const char *call);
// Renames the file at `path`, if there is one, to the first free name of path.1 to path.99. The file keeps its name if
// no name is free or the rename fails.
void keep_earlier_file(const std::string &path);

}  // namespace fsdp::trace
