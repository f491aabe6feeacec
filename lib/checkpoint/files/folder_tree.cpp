// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/files/folder_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/error.h"
#include "checkpoint/files/owner.h"

namespace fsdp::checkpoint {
namespace {

constexpr int folder_flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr int deepest = 8;  // no checkpoint has more

void remove_tree(int parent, const std::string &name, const std::string &shown, int depth) {
  if (::unlinkat(parent, name.c_str(), 0) == 0 || errno == ENOENT) return;
  if ((errno != EISDIR && errno != EPERM) || depth == deepest) fail_errno(errno, format_text("{}: removing it", shown));
  {
    const Fd folder(::openat(parent, name.c_str(), folder_flags));
    if (!folder && errno == ENOENT) return;  // another job has removed it
    if (!folder) fail_errno(errno, format_text("{}: cannot be opened as a folder", shown));
    for (const std::string &inside : list_folder(folder.get(), shown))
      if (inside != owner_name) remove_tree(folder.get(), inside, shown + "/" + inside, depth + 1);
    // Last: whoever finds the rest knows by it whose that was.
    if (::unlinkat(folder.get(), owner_name, 0) != 0 && errno != ENOENT)
      fail_errno(errno, format_text("{}/{}: removing it", shown, owner_name));
  }
  if (::unlinkat(parent, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)
    fail_errno(errno, format_text("{}: removing it", shown));
}

}  // namespace

Fd open_folder(int parent, const std::string &name, const std::string &shown) {
  Fd folder(::openat(parent, name.c_str(), folder_flags));
  if (!folder) fail_errno(errno, format_text("{}: cannot be opened as a folder", shown));
  return folder;
}

std::pair<Fd, std::string> find_file(int folder, const std::string &name, const std::string &shown) {
  Fd inside(::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!inside) fail_errno(errno, format_text("{}: cannot be opened as a folder", shown));
  std::string rest = name;
  for (size_t slash = rest.find('/'); slash != rest.npos; slash = rest.find('/')) {
    inside = open_folder(inside.get(), rest.substr(0, slash), shown);
    rest.erase(0, slash + 1);
  }
  return {std::move(inside), rest};
}

std::vector<std::string> list_folder(int folder, const std::string &shown) {
  Fd own(::openat(folder, ".", folder_flags));  // with a place of its own to read from
  const std::unique_ptr<DIR, int (*)(DIR *)> entries(own ? ::fdopendir(own.get()) : nullptr, ::closedir);
  if (!entries) fail_errno(errno, format_text("{}: looking into it", shown));
  own.release();
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent *entry = ::readdir(entries.get());
    if (!entry) break;
    if (const std::string name = entry->d_name; name != "." && name != "..") names.push_back(name);
  }
  if (errno) fail_errno(errno, format_text("{}: looking into it", shown));
  std::ranges::sort(names);
  return names;
}

void remove_tree(int parent, const std::string &name, const std::string &shown) { remove_tree(parent, name, shown, 0); }

void sync_folder(int folder, const std::string &shown) {
  while (::fsync(folder) != 0)
    if (errno != EINTR) fail_errno(errno, format_text("{}: bringing its names to the disk", shown));
}

void sync_tree(int folder, const std::string &shown) {
  for (const std::string &name : list_folder(folder, shown)) {
    const Fd inside(::openat(folder, name.c_str(), folder_flags));
    if (inside) sync_tree(inside.get(), shown + "/" + name);
    if (!inside && errno != ENOTDIR) fail_errno(errno, format_text("{}/{}: opening it", shown, name));
  }
  sync_folder(folder, shown);
}

}  // namespace fsdp::checkpoint
