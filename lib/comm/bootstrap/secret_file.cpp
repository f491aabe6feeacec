// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/secret_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/fd.h"

namespace fsdp::comm {
namespace {

constexpr size_t longest_secret = 4096, longest_line_end = 2;

template <class... Args>
[[noreturn]] void refuse_secret(const std::string &path, fmt::format_string<Args...> why, Args &&...args) {
  fail(FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET_FILE='{}': {}", path, format_text(why, std::forward<Args>(args)...));
}

// Without waiting for a writer, should it be a pipe.
Fd open_file(const std::string &path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC));
  if (file) return file;
  if (errno == ELOOP) refuse_secret(path, "it is a symbolic link; name the file itself");
  refuse_secret(path, "{}", strerrordesc_np(errno));
}

// As ssh does with keys.
void check_owner(const Fd &file, const std::string &path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) refuse_secret(path, "{}", strerrordesc_np(errno));
  if (!S_ISREG(status.st_mode)) refuse_secret(path, "it is not a regular file");
  const uid_t user = ::geteuid();
  if (status.st_uid != user && status.st_uid != 0)
    refuse_secret(path, "it belongs to user {}; a secret of user {} must belong to that user or root", status.st_uid,
                  user);
  if (status.st_mode & 077)
    refuse_secret(path, "others may read or write it (mode {:04o}); chmod 600 it", status.st_mode & 07777);
}

std::string read_text(const Fd &file, const std::string &path) {
  std::string text(longest_secret + longest_line_end + 1, '\0');
  size_t length = 0;
  while (length < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + length, text.size() - length);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse_secret(path, "{}", strerrordesc_np(errno));
    if (got == 0) break;
    length += static_cast<size_t>(got);
  }
  text.resize(length);
  return text;
}

}  // namespace

std::string read_secret_file(const std::string &path) {
  const Fd file = open_file(path);
  check_owner(file, path);
  std::string text = read_text(file, path);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.empty() || text.size() > longest_secret)
    refuse_secret(path, "a secret of 1 to {} bytes is expected", longest_secret);
  return text;
}

}  // namespace fsdp::comm
