// SPDX-License-Identifier: Apache-2.0
// Which job a folder `.tmp-ID` belongs to. Its file `owner` is locked by the process that writes the checkpoint, and
// the kernel takes the lock away when that process ends, however it does. The lock belongs to the open file, not to the
// process: other threads of it, which are other ranks, do not share it.
#pragma once

#include <string>
#include <string_view>

#include "base/fd.h"

namespace fsdp::checkpoint {

inline constexpr const char *owner_name = "owner";
inline constexpr std::string_view temporary_prefix = ".tmp-";
inline constexpr std::string_view unowned_prefix = ".new-";  // until its owner is there and locked

// Makes the file, with the text, and locks it; where the file system has no locks it is held without one.
Fd make_owner(int folder, const std::string &text, const std::string &shown);
// The text of a folder's owner; empty: none can be read.
std::string read_owner(int folder);
// 32 hexadecimal digits that no other has.
std::string make_id();
// Of a folder that has had its name from the start.
std::string named_owner(const std::string &id);
// Has it had its name from the start, and is not ended?
bool has_named_owner(int parent, const std::string &name);
// Is this one of a job that no longer lives? Only folders with a name of ours are; of these, those `.tmp-ID` whose lock
// can be taken are. Those that had no locked owner for a day are, too: they were about to begin, or to end, when their
// job did; or the file system has no locks.
bool is_abandoned(int parent, const std::string &name);
// ... with a named owner. It may be whole all the same.
bool is_abandoned_with_name(int parent, const std::string &name);

}  // namespace fsdp::checkpoint
