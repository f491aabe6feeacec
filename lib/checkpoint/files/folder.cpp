// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/files/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "checkpoint/files/aligned_bytes.h"
#include "checkpoint/files/folder_tree.h"
#include "checkpoint/files/in_file.h"
#include "checkpoint/files/owner.h"
#include "checkpoint/format/block_sums.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint64_t longest_manifest = uint64_t{1} << 30;

// Its name is on the disk then, too. What is wrong open() says.
void make_one(const std::string &path) {
  if (::mkdir(path.c_str(), 0700) != 0) return;
  const size_t slash = path.find_last_of('/');
  const std::string parent = slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const Fd folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder) sync_folder(folder.get(), parent);
}

void make_path(const std::string &path) {
  for (size_t slash = path.find('/', 1); slash != path.npos; slash = path.find('/', slash + 1))
    make_one(path.substr(0, slash));
  make_one(path);
}

// There is no whole checkpoint of that name. What cannot be read now, or by this release, may be the newest one.
bool is_none(const Error &error) {
  const bool not_there = error.origin_code == ENOENT || error.origin_code == ENOTDIR || error.origin_code == ELOOP;
  return error.status == FSDP_INVALID_ARGUMENT || (error.status == FSDP_SYSTEM && not_there);
}

}  // namespace

std::string step_name(uint64_t step) { return format_text("step-{:010}", step); }

bool is_checkpoint_name(const std::string &name) {
  constexpr std::string_view prefix = "step-";
  return name.starts_with(prefix) && name.size() >= prefix.size() + 10 && name.size() <= prefix.size() + 20 &&
         name.find_first_not_of("0123456789", prefix.size()) == name.npos;
}

Folder Folder::make(const std::string &path) {
  make_path(path);
  return Folder(path);
}

Folder::Folder(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (!fd_) fail_errno(errno, format_text("{}: cannot be opened as a folder", path_));
}

Manifest Folder::read_manifest(const std::string &name, std::string *sum) const {
  const std::string path = shown(name);
  const Fd folder(::openat(fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) fail_errno(errno, format_text("{}: cannot be opened as a folder", path));
  const InFile file(folder.get(), manifest_name, path + "/" + manifest_name);
  if (file.bytes() > longest_manifest)
    fail(FSDP_INVALID_ARGUMENT, "{}: has {} bytes, of at most {}", file.shown(), file.bytes(), longest_manifest);
  const AlignedBytes buffer(InFile::needed_for(0, file.bytes()));
  const auto bytes = file.read(0, file.bytes(), buffer.bytes());
  const std::string_view text(reinterpret_cast<const char *>(bytes.data()), bytes.size());
  if (sum) *sum = long_sum_of(text);
  return parse_manifest(text, file.shown());
}

std::vector<FolderEntry> Folder::list(std::vector<std::string> *problems) const {
  std::vector<FolderEntry> entries;
  for (const std::string &name : list_folder(fd(), path_)) {
    if (!is_checkpoint_name(name)) continue;
    try {
      entries.push_back({name, read_manifest(name)});
    } catch (const Error &error) {
      if (!is_none(error)) throw;
      if (problems && !is_unfinished(name)) problems->push_back(error.message);
    }
  }
  std::ranges::sort(entries, [](const FolderEntry &a, const FolderEntry &b) {
    return std::tie(a.manifest.sequence, a.name) > std::tie(b.manifest.sequence, b.name);
  });
  return entries;
}

bool Folder::has(const std::string &name) const {
  struct stat status {};
  if (::fstatat(fd(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (errno != ENOENT) fail_errno(errno, format_text("{}: looking for it", shown(name)));
  return false;
}

// Nothing is in it yet, or no more; or its owner tells.
bool Folder::is_unfinished(const std::string &name) const {
  if (has_named_owner(fd(), name)) return true;
  const Fd folder(::openat(fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  return folder && list_folder(folder.get(), shown(name)).empty();
}

// Whoever is killed behind the manifest leaves a whole checkpoint, with its owner in it.
bool Folder::is_leftover(const std::string &name) const {
  if (!is_checkpoint_name(name)) return is_abandoned(fd(), name);
  if (!is_abandoned_with_name(fd(), name)) return false;
  try {
    read_manifest(name);
  } catch (const Error &error) {
    return is_none(error);
  }
  return false;
}

std::vector<std::string> Folder::remove_leftovers() const {
  std::vector<std::string> removed;
  for (const std::string &name : list_folder(fd(), path_)) {
    if (!is_leftover(name)) continue;
    try {
      remove_tree(fd(), name, shown(name));
      removed.push_back(name);
    } catch (const Error &) {  // it hinders nobody, and goes another time
    }
  }
  return removed;
}

void Folder::remove(const std::string &name) const {
  NewCheckpoint grave(*this);
  const std::string inside = grave.written_name() + "/" + name;
  if (::renameat(fd(), name.c_str(), fd(), inside.c_str()) != 0)
    fail_errno(errno, format_text("{}: removing it", shown(name)));
}

void Folder::remove_in_place(const std::string &name) const {
  const Fd folder = open_folder(fd(), name, shown(name));
  if (::unlinkat(folder.get(), owner_name, 0) != 0 && errno != ENOENT)  // of a job that is dead, or was this one
    fail_errno(errno, format_text("{}/{}: removing it", shown(name), owner_name));
  const Fd owner = make_owner(folder.get(), named_owner(make_id()), shown(name));
  if (::unlinkat(folder.get(), manifest_name, 0) != 0)
    fail_errno(errno, format_text("{}/{}: removing it", shown(name), manifest_name));
  remove_tree(fd(), name, shown(name));
}

}  // namespace fsdp::checkpoint
