// SPDX-License-Identifier: Apache-2.0
#include "trace/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <utility>

#include "base/error.h"

namespace fsdp::trace {
namespace {

// Writing more than the process's limit for files (ulimit -f) would end the process by SIGXFSZ. During this scope, only
// the write fails.
class SizeSignalBlocked {
 public:
  SizeSignalBlocked() noexcept {
    sigemptyset(&one_);
    sigaddset(&one_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &one_, &before_);
  }
  ~SizeSignalBlocked() {
    constexpr timespec at_once{};
    while (!was_pending_ && sigtimedwait(&one_, nullptr, &at_once) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SizeSignalBlocked(const SizeSignalBlocked &) = delete;
  SizeSignalBlocked &operator=(const SizeSignalBlocked &) = delete;

 private:
  sigset_t one_, before_;
  bool was_pending_;
};

// Returns errno, or 0.
int write_all(int fd, const std::string &text) noexcept {
  const SizeSignalBlocked blocked;
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return errno;
    if (count > 0) done += static_cast<size_t>(count);
  }
  return 0;
}

// A new file beside the path, which only this user may read. It is removed again unless it becomes the file at the
// path.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string &path) : path_(path) {
    for (int i = 0; i < 100; ++i) {  // skips files that a crash left behind
      name_ = format_text("{}.tmp.{}.{}", path, ::getpid(), i);
      fd_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
      made_ = fd_ >= 0;
      code_ = made_ ? 0 : errno;
      if (code_ != EEXIST) return;
    }
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (made_) ::unlink(name_.c_str());
  }
  TemporaryFile(const TemporaryFile &) = delete;
  TemporaryFile &operator=(const TemporaryFile &) = delete;

  const std::string &name() const noexcept { return name_; }
  // errno if the file could not be created, else 0. write() and become() also return errno or 0.
  int code() const noexcept { return code_; }
  int write(const std::string &text) noexcept {
    if (const int code = write_all(fd_, text)) return code;
    return ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
  }
  int become() noexcept {
    if (::rename(name_.c_str(), path_.c_str()) != 0) return errno;
    made_ = false;
    return 0;
  }

 private:
  const std::string &path_;
  std::string name_;
  int fd_ = -1, code_ = 0;
  bool made_ = false;
};

const char *kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFLNK: return "a symbolic link";
    case S_IFIFO: return "a pipe";
    case S_IFSOCK: return "a socket";
    default: return "a device";
  }
}

// Throws unless the path is a regular file or does not exist, because a rename would replace anything else.
void check_place(const std::string &path, const char *call) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  if (S_ISDIR(status.st_mode)) fail_errno(EISDIR, format_text("{}: '{}'", call, path));
  throw Error(FSDP_SYSTEM,
              format_text("{}: '{}' is {}; a regular file, or a name that is free, is expected", call, path,
                          kind_of(status.st_mode)),
              -1, FSDP_ORIGIN_OS, EEXIST);
}

}  // namespace

void replace_file(const std::string &path, const std::string &text, const char *call) {
  check_place(path, call);
  TemporaryFile temporary(path);
  if (const int code = temporary.code()) fail_errno(code, format_text("{}: creating '{}'", call, temporary.name()));
  if (const int code = temporary.write(text))
    fail_errno(code, format_text("{}: '{}': writing '{}'", call, path, temporary.name()));
  check_place(path, call);
  if (const int code = temporary.become())
    fail_errno(code, format_text("{}: '{}': renaming it from '{}'", call, path, temporary.name()));
}

// O_NONBLOCK is needed, because another process may put a pipe there after the check, and the pipe must not block this
// thread.
void append_to_file(const std::string &path, const std::string &text, const char *call) {
  check_place(path, call);
  const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  if (fd < 0) fail_errno(errno, format_text("{}: opening '{}'", call, path));
  const int code = write_all(fd, text);
  ::close(fd);
  if (code) fail_errno(code, format_text("{}: writing '{}'", call, path));
}

// The rename must not replace a file, because another process of this rank may keep its file at the same time.
void keep_earlier_file(const std::string &path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return;
  for (int i = 1; i < 100; ++i) {
    const std::string kept = format_text("{}.{}", path, i);
    if (::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, kept.c_str(), RENAME_NOREPLACE) == 0 || errno != EEXIST) return;
  }
}

}  // namespace fsdp::trace
