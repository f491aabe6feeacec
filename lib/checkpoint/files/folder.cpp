// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/files/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/checked.h"
#include "base/error.h"
#include "checkpoint/files/file.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {

namespace {

constexpr int folder_flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr int deepest = 8;  // no checkpoint has folders at a greater depth

void remove_tree(int parent, const std::string &name, const std::string &shown, int depth) {
  if (::unlinkat(parent, name.c_str(), 0) == 0 || errno == ENOENT) return;
  if ((errno != EISDIR && errno != EPERM) || depth == deepest) fail_errno(errno, format_text("{}: removing it", shown));
  {
    const Fd folder(::openat(parent, name.c_str(), folder_flags));
    if (!folder && errno == ENOENT) return;  // another job has removed it
    if (!folder) fail_errno(errno, format_text("{}: cannot be opened as a folder", shown));
    for (const std::string &inside : list_folder(folder.get(), shown))
      if (inside != owner_name) remove_tree(folder.get(), inside, shown + "/" + inside, depth + 1);
    // The owner file is removed last, because it tells which job made the folder as long as the rest exists.
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
  Fd own(::openat(folder, ".", folder_flags));  // a descriptor with its own read position
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

namespace {

constexpr uint64_t longest_manifest = uint64_t{1} << 30;
constexpr std::string_view step_prefix = "step-";

// Makes a folder, and writes its name to the disk. Returns errno, or 0.
int make_one(const std::string &path) {
  if (::mkdirat(AT_FDCWD, path.c_str(), 0700) != 0) return errno;
  const size_t slash = path.find_last_of('/');
  const std::string parent = slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const Fd folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder) sync_folder(folder.get(), parent);
  return 0;
}

// Making an existing folder may fail with many errors. An error is reported only if the folder does not exist.
void make_path(const std::string &path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string part = path.substr(0, slash);
    struct stat status {};
    const int failed = make_one(part);
    if (failed && ::stat(part.c_str(), &status) != 0)
      fail_errno(errno == ENOENT ? failed : errno, format_text("{}: making the folder", part));
    if (slash == path.npos) return;
  }
}

// Does the error mean that the process lacks a resource? If so, it says nothing about the file.
bool is_of_process(const Error &error) {
  return error.status == FSDP_OUT_OF_MEMORY ||
         (error.status == FSDP_SYSTEM &&
          (error.origin_code == EMFILE || error.origin_code == ENFILE || error.origin_code == ENOMEM));
}

// A lost file of a checkpoint is damage. Its errno is dropped, because ENOENT would mean that the folder does not
// exist.
Error damage_of(const Error &error, const std::string &shown) {
  if (error.origin_code != ENOENT) return error;
  return {FSDP_INVALID_ARGUMENT, format_text("{}: is missing; the checkpoint is damaged", shown)};
}

bool is_forbidden(const UnreadableCheckpoint &one) {
  return one.why.origin_code == EACCES || one.why.origin_code == EPERM;
}

// A save after an unreadable checkpoint leaves a gap of this size, so that its sequence is certainly higher.
constexpr uint64_t sequence_leap = uint64_t{1} << 20;

uint64_t step_of(const std::string &name) { return std::strtoull(name.c_str() + step_prefix.size(), nullptr, 10); }

int64_t time_of(const struct stat &status) {
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

}  // namespace

std::string step_name(uint64_t step) { return format_text("step-{:010}", step); }

bool is_checkpoint_name(const std::string &name) {
  return name.starts_with(step_prefix) && name.size() >= step_prefix.size() + 10 &&
         name.size() <= step_prefix.size() + 20 &&
         name.find_first_not_of("0123456789", step_prefix.size()) == name.npos;
}

void require_newest_is_known(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable,
                             std::string_view way_out) {
  const auto first = std::ranges::find_if(unreadable, &UnreadableCheckpoint::may_be_newest);
  if (first == unreadable.end()) return;
  std::string text;
  for (const UnreadableCheckpoint &one : unreadable)
    if (one.may_be_newest()) text += (text.empty() ? "" : "; ") + one.why.message;
  const bool forbidden = is_forbidden(*first);
  throw Error(first->why.status,
              format_text("{}: it may be the newest that {}: {}; {} it{}, or name the checkpoint to be loaded", path,
                          forbidden ? "this process may not read" : "is damaged", text,
                          forbidden ? "let this process read" : "remove", way_out),
              -1, first->why.origin, first->why.origin_code);
}

Folder Folder::make(const std::string &path) {
  make_path(path);
  return Folder(path);
}

Folder::Folder(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (!fd_) fail_errno(errno, format_text("{}: cannot be opened as a folder", path_));
}

std::string Folder::read_manifest_text(const std::string &name) const {
  const std::string path = shown(name);
  const Fd folder(::openat(fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) fail_errno(errno, format_text("{}: cannot be opened as a folder", path));
  const InFile file(folder.get(), manifest_name, path + "/" + manifest_name);
  if (file.bytes() > longest_manifest)
    fail(FSDP_INVALID_ARGUMENT, "{}: has {} bytes, of at most {}", file.shown(), file.bytes(), longest_manifest);
  const AlignedBytes buffer(InFile::needed_for(0, file.bytes()));
  const auto bytes = file.read(0, file.bytes(), buffer.bytes());
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

Manifest Folder::read_manifest(const std::string &name, std::string *sum) const {
  const std::string text = read_manifest_text(name);
  if (sum) *sum = long_sum_of(text);
  return parse_manifest(text, shown(name) + "/" + manifest_name);
}

std::vector<FolderEntry> Folder::list(std::vector<UnreadableCheckpoint> *unreadable) const {
  std::vector<FolderEntry> entries;
  for (const std::string &name : list_folder(fd(), path_)) {
    if (!is_checkpoint_name(name)) continue;
    try {
      entries.push_back({name, read_manifest(name)});
    } catch (const Error &error) {
      if (is_of_process(error)) throw;
      const bool removed_since = error.origin_code == ENOENT && !has(name);
      if (unreadable && !removed_since && !is_unfinished(name))
        unreadable->push_back({name, damage_of(error, shown(name) + "/" + manifest_name)});
    }
  }
  std::ranges::sort(entries, [](const FolderEntry &a, const FolderEntry &b) {
    return std::tie(a.manifest.sequence, a.name) > std::tie(b.manifest.sequence, b.name);
  });
  if (unreadable)
    for (UnreadableCheckpoint &one : *unreadable) one.newer = count_newer(one.name, entries);
  return entries;
}

// The sequence may be wrong if the manifest's checksum is wrong, and a step may be saved twice. So sequence and step
// count only together with the times.
size_t Folder::count_newer(const std::string &name, const std::vector<FolderEntry> &entries) const {
  const std::optional<uint64_t> claimed = claimed_sequence(name);
  const std::optional<int64_t> written = written_at(name);
  const auto is_newer = [&](const FolderEntry &entry) {
    const std::optional<int64_t> its = written && !entries.empty() ? written_at(entry.name) : std::nullopt;
    if (its && *its < *written) return false;
    return claimed ? entry.manifest.sequence > *claimed : step_of(entry.name) > step_of(name);
  };
  return static_cast<size_t>(std::ranges::find_if_not(entries, is_newer) - entries.begin());
}

// The sequence number in the text of a damaged manifest.
std::optional<uint64_t> Folder::claimed_sequence(const std::string &name) const try {
  return find_sequence(read_manifest_text(name));
} catch (const Error &) {
  return std::nullopt;
}

// The time when the checkpoint's first file of weights was written. The time of a replaced manifest, or of its folder,
// would be wrong.
std::optional<int64_t> Folder::written_at(const std::string &name) const {
  struct stat status {};
  try {
    const Fd inside = open_folder(fd(), name, shown(name));
    for (const std::string &file : list_folder(inside.get(), shown(name)))
      if (file.ends_with(".safetensors") && ::fstatat(inside.get(), file.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0)
        return time_of(status);
  } catch (const Error &) {  // the folder's time is used instead
  }
  if (::fstatat(fd(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(status.st_mode)) return std::nullopt;
  return time_of(status);
}

uint64_t Folder::next_sequence() const {
  std::vector<UnreadableCheckpoint> unreadable;
  const std::vector<FolderEntry> entries = list(&unreadable);
  const uint64_t last = entries.empty() ? 0 : entries.front().manifest.sequence;
  // Each unreadable checkpoint may have left a gap before the next one.
  const auto leaps = static_cast<uint64_t>(std::ranges::count_if(unreadable, &UnreadableCheckpoint::may_be_newest));
  return checked_add(last, leaps ? leaps * sequence_leap : 1, "a checkpoint's sequence");
}

bool Folder::has(const std::string &name) const {
  struct stat status {};
  if (::fstatat(fd(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (errno != ENOENT) fail_errno(errno, format_text("{}: looking for it", shown(name)));
  return false;
}

// True if the folder is empty, or if it has a named owner and its manifest does not exist or was not written to its
// end.
bool Folder::is_unfinished(const std::string &name) const try {
  const Fd folder(::openat(fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) return false;
  if (!has_named_owner(fd(), name)) return list_folder(folder.get(), shown(name)).empty();
  return !ends_as_manifest(read_manifest_text(name));
} catch (const Error &error) {
  return error.origin_code == ENOENT;
}

// A rank that is killed after it has written the manifest leaves a complete checkpoint that still has its owner file.
bool Folder::is_leftover(const std::string &name) const {
  if (!is_checkpoint_name(name)) return is_abandoned(fd(), name);
  return is_abandoned_with_name(fd(), name) && is_unfinished(name);
}

std::vector<std::string> Folder::remove_leftovers() const {
  std::vector<std::string> removed;
  for (const std::string &name : list_folder(fd(), path_)) {
    if (!is_leftover(name)) continue;
    try {
      remove_tree(fd(), name, shown(name));
      removed.push_back(name);
    } catch (const Error &) {  // a leftover does no harm, and a later save removes it
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
  if (::unlinkat(folder.get(), owner_name, 0) != 0 && errno != ENOENT)  // the owner is a dead job, or this one
    fail_errno(errno, format_text("{}/{}: removing it", shown(name), owner_name));
  const Fd owner = make_owner(folder.get(), named_owner(make_id()), shown(name));
  if (::unlinkat(folder.get(), manifest_name, 0) != 0)
    fail_errno(errno, format_text("{}/{}: removing it", shown(name), manifest_name));
  remove_tree(fd(), name, shown(name));
}

}  // namespace fsdp::checkpoint
