// SPDX-License-Identifier: Apache-2.0
#include "membership/launch/secret_file.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace fsdp::membership {
namespace {

constexpr size_t longest_secret = 4096, longest_line_end = 2;
constexpr const char *wanted_mode = "chmod 600 it (in Kubernetes: defaultMode: 0400, or 0440 with fsGroup)";

template <class... Args>
[[noreturn]] void refuse_secret(const std::string &path, fmt::format_string<Args...> why, Args &&...args) {
  fail(FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET_FILE='{}': {}", path, format_text(why, std::forward<Args>(args)...));
}

[[noreturn]] void refuse_open(const std::string &path, int code) {
  if (code != EACCES) refuse_secret(path, "{}", strerrordesc_np(code));
  refuse_secret(path,
                "{}: this process runs as user {}; give that user the file (chown, then chmod 600), or let a group of "
                "this process read it (chgrp, then chmod 640; in Kubernetes: defaultMode: 0440 with fsGroup)",
                strerrordesc_np(code), ::geteuid());
}

bool is_trusted(uid_t user) { return user == ::geteuid() || user == 0; }

// Follows symbolic links to the file itself, one part of a path at a time, so that each part is checked before it is
// followed. Only root and this user may be able to change the targets of the links. Kubernetes mounts secrets as such
// links.
class LinkedPath {
 public:
  explicit LinkedPath(const std::string &path) : path_(path) {
    const size_t slash = path.rfind('/');
    rest_ = {path.substr(slash == path.npos ? 0 : slash + 1)};
    at_ = open_folder(AT_FDCWD, slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash));
  }
  Fd open() {
    for (int left = max_links; left > 0;) {
      const std::string part = std::move(rest_.front());
      rest_.pop_front();
      std::array<char, PATH_MAX> target{};
      const ssize_t length = ::readlinkat(at_.get(), part.c_str(), target.data(), target.size() - 1);
      if (length > 0) {
        check_link(part);
        follow({target.data(), static_cast<size_t>(length)});
        --left;
      } else if (errno != EINVAL) {  // EINVAL: the part is not a link
        refuse_secret(path_, "{}", strerrordesc_np(errno));
      } else if (rest_.empty()) {
        return open_at(at_.get(), part, O_RDONLY | O_NONBLOCK | O_NOCTTY);
      } else {
        at_ = open_folder(at_.get(), part);
      }
    }
    refuse_secret(path_, "it leads over more than {} symbolic links", max_links);
  }

 private:
  Fd open_at(int folder, const std::string &part, int flags) {
    Fd file(::openat(folder, part.c_str(), flags | O_NOFOLLOW | O_CLOEXEC));
    if (!file) refuse_open(path_, errno);
    return file;
  }
  // Folders before the first link are not checked, just as for a file that is not a link.
  Fd open_folder(int from, const std::string &name) {
    Fd folder(::openat(from, name.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC | (from == AT_FDCWD ? 0 : O_NOFOLLOW)));
    if (!folder) refuse_secret(path_, "{}", strerrordesc_np(errno));
    return folder;
  }
  void follow(const std::string &target) {
    if (target.starts_with('/')) at_ = open_folder(AT_FDCWD, "/");
    std::deque<std::string> parts;
    std::istringstream words(target);
    for (std::string part; std::getline(words, part, '/');)
      if (!part.empty()) parts.push_back(part);
    rest_.insert(rest_.begin(), parts.begin(), parts.end());
    if (rest_.empty()) refuse_secret(path_, "it leads to a folder");
  }
  void check_link(const std::string &part) const {
    struct stat link {
    }, folder{};
    if (::fstatat(at_.get(), part.c_str(), &link, AT_SYMLINK_NOFOLLOW) != 0 || ::fstat(at_.get(), &folder) != 0)
      refuse_secret(path_, "{}", strerrordesc_np(errno));
    if (!is_trusted(link.st_uid))
      refuse_secret(path_,
                    "it leads over the symbolic link '{}' of user {}; links of root and of this user are followed",
                    part, link.st_uid);
    const bool others_write = folder.st_mode & 022 && !(folder.st_mode & S_ISVTX);
    if (!is_trusted(folder.st_uid) || others_write)
      refuse_secret(
          path_,
          "it leads over the symbolic link '{}' in a folder (user {}, mode {:04o}) that others may change; name "
          "the file itself, or chmod go-w the folder",
          part, folder.st_uid, folder.st_mode & 07777);
  }

  static constexpr int max_links = 16;
  const std::string &path_;
  Fd at_;                         // the folder where rest_ begins
  std::deque<std::string> rest_;  // parts of a path, the file's name last
};

// Opens the file. If it is a pipe, does not wait for a writer.
Fd open_file(const std::string &path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC));
  if (file) return file;
  if (errno == ELOOP) return LinkedPath(path).open();
  refuse_open(path, errno);
}

bool is_own_group(gid_t group) {
  if (group == ::getegid()) return true;
  std::vector<gid_t> groups(static_cast<size_t>(std::max(::getgroups(0, nullptr), 0)));
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  return std::find(groups.begin(), groups.begin() + std::max(count, 0), group) != groups.begin() + std::max(count, 0);
}

// Makes the checks that ssh makes for keys, except that a group of this process may be able to read the file.
// Kubernetes mounts secrets in this way (fsGroup).
void check_owner(const Fd &file, const std::string &path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) refuse_secret(path, "{}", strerrordesc_np(errno));
  if (!S_ISREG(status.st_mode)) refuse_secret(path, "it is not a regular file");
  if (!is_trusted(status.st_uid))
    refuse_secret(path, "it belongs to user {}; a secret of user {} must belong to that user or root", status.st_uid,
                  ::geteuid());
  const mode_t mode = status.st_mode & 07777;
  const bool group_reads = mode & 040 && !is_own_group(status.st_gid);
  if (group_reads && !(mode & 037))
    refuse_secret(path, "group {} may read it (mode {:04o}), and this process is not of that group; {}", status.st_gid,
                  mode, wanted_mode);
  if (mode & 037) refuse_secret(path, "others may read or change it (mode {:04o}); {}", mode, wanted_mode);
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

}  // namespace fsdp::membership
