// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/files/file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace fsdp::checkpoint {

namespace {

// The flags are constants, because for variable flags glibc's fortified headers call a different function.
template <int flags>
Fd open_file(int folder, const std::string &name) {
  Fd fd(::openat(folder, name.c_str(), flags | O_DIRECT));
  return fd || errno != EINVAL ? std::move(fd) : Fd(::openat(folder, name.c_str(), flags));
}

}  // namespace

// O_NONBLOCK is needed because opening a pipe would otherwise wait for a writer.
InFile::InFile(int folder, const std::string &name, std::string shown, LinkPolicy links) : shown_(std::move(shown)) {
  constexpr int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  fd_ = links == LinkPolicy::refused ? open_file<flags | O_NOFOLLOW>(folder, name) : open_file<flags>(folder, name);
  struct stat status {};
  if (!fd_ && errno == ELOOP && links == LinkPolicy::refused)
    throw Error(FSDP_SYSTEM, format_text("{}: is a symbolic link, which is not followed here", shown_), -1,
                FSDP_ORIGIN_OS, ELOOP);
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) fail_errno(errno, format_text("{}: cannot be opened", shown_));
  if (!S_ISREG(status.st_mode))
    throw Error(FSDP_SYSTEM, format_text("{}: is no regular file", shown_), -1, FSDP_ORIGIN_OS, EINVAL);
  bytes_ = static_cast<uint64_t>(status.st_size);
}

uint64_t InFile::needed_for(uint64_t offset, uint64_t count) {
  return round_up(offset + count, io_alignment) - page_of(offset);
}

std::span<const std::byte> InFile::read(uint64_t offset, uint64_t count, std::span<std::byte> buffer) const {
  const uint64_t first = page_of(offset), skipped = offset - first;
  read_pages(fd_, first, buffer.first(needed_for(offset, count)), skipped + count, shown_);
  return buffer.subspan(skipped, count);
}

OutFile::OutFile(int folder, const std::string &name, std::string shown) : shown_(std::move(shown)) {
  open(folder, name);
  if (!fd_) fail_errno(errno, format_text("{}: cannot be created", shown_));
}

void OutFile::open(int folder, const std::string &name) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  fd_ = Fd(::openat(folder, name.c_str(), flags | O_DIRECT, 0600));
  if (fd_ || errno != EINVAL) return;
  // A file system may refuse direct I/O after it has created the file.
  if (::unlinkat(folder, name.c_str(), 0) != 0 && errno != ENOENT) return;
  fd_ = Fd(::openat(folder, name.c_str(), flags, 0600));
}

void OutFile::write(uint64_t offset, std::span<const std::byte> data) { write_pages(fd_, offset, data, shown_); }

// The disk may report the failure of an earlier write at any of these calls.
void OutFile::finish(uint64_t bytes) {
  while (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) fail_errno(errno, format_text("{}: setting its length to {}", shown_, bytes));
  while (::fsync(fd_.get()) != 0)
    if (errno != EINTR) fail_errno(errno, format_text("{}: bringing it to the disk", shown_));
  if (::close(fd_.release()) != 0 && errno != EINTR) fail_errno(errno, format_text("{}: closing it", shown_));
}

namespace {

constexpr std::string_view named_prefix = "named ";
constexpr time_t day_s = 24 * 60 * 60;

// Locks the whole open file (F_OFD_SETLK). On failure errno says why.
bool take_lock(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return ::fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// Is the text one of our ids? Folders of other programs are left alone, whatever their names are.
bool is_id(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

bool is_a_day_old(int folder) {
  struct stat status {};
  return ::fstat(folder, &status) == 0 && std::time(nullptr) - status.st_mtime > day_s;
}

Fd open_owner(int folder) { return Fd(::openat(folder, owner_name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)); }

void lock_and_write(const Fd &file, const std::string &text, const std::string &shown) {
  if (!take_lock(file.get()) && (errno == EAGAIN || errno == EACCES))
    fail_errno(errno, format_text("{}/{}: another job has its lock", shown, owner_name));
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    fail_errno(errno, format_text("{}/{}: writing it", shown, owner_name));
}

// An owner file that was removed after it was opened has no lock either. Its job has finished with it, and another
// folder may have the name by now.
bool is_dead(const Fd &owner, int folder) {
  if (take_lock(owner.get())) {
    struct stat status {};
    return ::fstat(owner.get(), &status) == 0 && status.st_nlink > 0;
  }
  const bool held = errno == EAGAIN || errno == EACCES;  // otherwise this file system has no locks
  return !held && is_a_day_old(folder);
}

}  // namespace

std::string make_id() {
  uint64_t random[2];
  if (::getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random))
    fail_errno(errno, "random numbers for the name of a checkpoint");
  return format_text("{:016x}{:016x}", random[0], random[1]);
}

// The file gets its name only when it is locked and has its text, because another job would take an unlocked owner file
// as a sign of a dead job. Not all file systems support files without names, and giving one a name needs /proc.
Fd make_owner(int folder, const std::string &text, const std::string &shown) {
  if (Fd unnamed{::openat(folder, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600)}) {
    lock_and_write(unnamed, text, shown);
    const std::string itself = format_text("/proc/self/fd/{}", unnamed.get());
    if (::linkat(AT_FDCWD, itself.c_str(), folder, owner_name, AT_SYMLINK_FOLLOW) == 0) return unnamed;
  }
  Fd file(::openat(folder, owner_name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) fail_errno(errno, format_text("{}/{}: cannot be created", shown, owner_name));
  lock_and_write(file, text, shown);
  return file;
}

std::string read_owner(int folder) {
  const Fd file(::openat(folder, owner_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  char text[256];
  const ssize_t size = file ? ::read(file.get(), text, sizeof text) : 0;
  return {text, static_cast<size_t>(size > 0 ? size : 0)};
}

bool is_abandoned(int parent, const std::string &name) {
  const bool unowned = name.starts_with(unowned_prefix);
  if (!unowned && !name.starts_with(temporary_prefix)) return false;
  const Fd folder(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder || !is_id(name.substr(temporary_prefix.size()))) return false;
  if (unowned) return is_a_day_old(folder.get());
  const Fd owner = open_owner(folder.get());
  if (!owner) return errno == ENOENT && is_a_day_old(folder.get());
  return is_dead(owner, folder.get());
}

std::string named_owner(const std::string &id) { return std::string(named_prefix) + id; }

// The names of other owner files, with their text, appear before the folder has a name.
bool has_named_owner(int parent, const std::string &name) {
  const Fd folder(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder || ::faccessat(folder.get(), owner_name, F_OK, AT_SYMLINK_NOFOLLOW) != 0) return false;
  const std::string text = read_owner(folder.get());
  return text.empty() || (text.starts_with(named_prefix) && is_id(std::string_view(text).substr(named_prefix.size())));
}

bool is_abandoned_with_name(int parent, const std::string &name) {
  if (!has_named_owner(parent, name)) return false;
  const Fd folder(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  const Fd owner = folder ? open_owner(folder.get()) : Fd();
  return owner && is_dead(owner, folder.get());
}

}  // namespace fsdp::checkpoint
