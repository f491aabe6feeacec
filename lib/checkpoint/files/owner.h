// SPDX-License-Identifier: Apache-2.0
// The job to which a folder `.tmp-ID` belongs. The process that writes the checkpoint locks the folder's file `owner`,
// and the kernel releases the lock when that process ends in any way. The lock belongs to the open file and not to the
// process: other threads of the process, which are other ranks, do not share it.
#pragma once

#include <string>
#include <string_view>

#include "base/fd.h"

namespace fsdp::checkpoint {

inline constexpr const char *owner_name = "owner";
inline constexpr std::string_view temporary_prefix = ".tmp-";
inline constexpr std::string_view unowned_prefix = ".new-";  // used until the owner file exists and is locked
// Makes the file with the text and locks it. If the file system has no locks, the file is only kept open.
Fd make_owner(int folder, const std::string &text, const std::string &shown);
// Returns the text of a folder's owner file; empty if none can be read.
std::string read_owner(int folder);
// Returns 32 hexadecimal digits that are unique.
std::string make_id();
// The name of the owner file of a folder that has its name from the start.
std::string named_owner(const std::string &id);
// Has the folder had its name from the start, and has its save not ended?
bool has_named_owner(int parent, const std::string &name);
// Does the folder belong to a job that no longer lives? This is true only for folders with one of our names: for a
// `.tmp-ID` whose lock can be taken, and for folders without a locked owner for a day. The latter were about to begin
// or to end when their job ended, or the file system has no locks.
bool is_abandoned(int parent, const std::string &name);
// The same for a folder with a named owner. The checkpoint may still be whole.
bool is_abandoned_with_name(int parent, const std::string &name);

}  // namespace fsdp::checkpoint
