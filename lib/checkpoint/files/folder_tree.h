// SPDX-License-Identifier: Apache-2.0
// What is in folders, by their descriptors: no link is followed, and no other folder of that name is met.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace fsdp::checkpoint {

// Names in an open folder, in their order. All of these throw SYSTEM with the path, `shown`, and errno.
std::vector<std::string> list_folder(int folder, const std::string &shown);
// The folder that a name with folders in it leads to, and the name in that.
std::pair<Fd, std::string> find_file(int folder, const std::string &name, const std::string &shown);
Fd open_folder(int parent, const std::string &name, const std::string &shown);
// A folder with all that is in it; what is gone already is no failure.
void remove_tree(int parent, const std::string &name, const std::string &shown);
// Returns when names that were given or taken away in it are on the disk.
void sync_folder(int folder, const std::string &shown);
// ... and of the folders in it.
void sync_tree(int folder, const std::string &shown);

}  // namespace fsdp::checkpoint
