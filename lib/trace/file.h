// SPDX-License-Identifier: Apache-2.0
// Files that a context writes: for people whole or not at all, and what an earlier context wrote is kept.
#pragma once

#include <string>

namespace fsdp::trace {

// All or nothing: a file beside it, which only this user may read, becomes it when it is whole. Throws FSDP_SYSTEM with
// the call, the path and errno, also where something else than a regular file has that name, and leaves nothing behind
// then.
void replace_file(const std::string &path, const std::string &text, const char *call);
// At the end of the file, which is made if need be, as one piece unless the disk is full. Throws as replace_file.
void append_to_file(const std::string &path, const std::string &text, const char *call);
// Gives the file at `path`, if there is one, the first free name of path.1 to path.99; it stays where it is if none is
// free or it cannot be renamed.
void keep_earlier_file(const std::string &path);

}  // namespace fsdp::trace
