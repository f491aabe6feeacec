// SPDX-License-Identifier: Apache-2.0
#include "trace/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/error.h"

namespace fsdp::trace {
namespace {

// A path that nobody else uses: what a crash left behind is passed over.
int create_beside(const std::string &path, std::string &beside) {
  for (int i = 0; i < 100; ++i) {
    beside = format_text("{}.tmp.{}.{}", path, ::getpid(), i);
    const int fd = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0 || errno != EEXIST) return fd;
  }
  return -1;
}

int write_all(int fd, const std::string &text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return errno;
    if (count > 0) done += static_cast<size_t>(count);
  }
  return 0;
}

}  // namespace

void replace_file(const std::string &path, const std::string &text, const char *call) {
  std::string beside;
  const int fd = create_beside(path, beside);
  if (fd < 0) fail_errno(errno, format_text("{}: creating '{}'", call, beside));
  int code = write_all(fd, text);
  const char *what = "writing";
  if (::close(fd) != 0 && !code) code = errno;
  if (!code && ::rename(beside.c_str(), path.c_str()) != 0) code = errno, what = "renaming it from";
  if (!code) return;
  ::unlink(beside.c_str());
  fail_errno(code, format_text("{}: '{}': {} '{}'", call, path, what, beside));
}

// Not replacing: another process of this rank's may keep one at the same moment.
void keep_earlier_file(const std::string &path) {
  for (int i = 1; i < 100; ++i) {
    const std::string kept = format_text("{}.{}", path, i);
    if (::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, kept.c_str(), RENAME_NOREPLACE) == 0 || errno != EEXIST) return;
  }
}

}  // namespace fsdp::trace
