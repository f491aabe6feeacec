// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/files/out_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/error.h"
#include "checkpoint/files/aligned_bytes.h"

namespace fsdp::checkpoint {
namespace {

// The kernel writes at most some 2 GiB at once; less lets an interrupted process end sooner.
constexpr size_t most_at_once = size_t{1} << 30;

}  // namespace

OutFile::OutFile(int folder, const std::string &name, std::string shown) : shown_(std::move(shown)) {
  open(folder, name);
  if (!fd_) fail_errno(errno, format_text("{}: cannot be created", shown_));
}

void OutFile::open(int folder, const std::string &name) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  fd_ = Fd(::openat(folder, name.c_str(), flags | O_DIRECT, 0600));
  if (fd_ || errno != EINVAL) return;
  // A file system may say no to direct I/O after it has made the file.
  direct_ = false;
  if (::unlinkat(folder, name.c_str(), 0) != 0 && errno != ENOENT) return;
  fd_ = Fd(::openat(folder, name.c_str(), flags, 0600));
}

// Some file systems say no only when they are written to, or write a part that is no multiple.
bool OutFile::leave_direct() {
  if (!direct_) return false;
  direct_ = false;
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  return flags >= 0 && ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) == 0;
}

void OutFile::fail_at(int code, const char *what, uint64_t offset, uint64_t bytes) const {
  fail_errno(code, format_text("{}: {} {} bytes at {}", shown_, what, bytes, offset));
}

void OutFile::write(uint64_t offset, std::span<const std::byte> data) {
  while (!data.empty()) {
    const size_t some = std::min(data.size(), most_at_once);
    const ssize_t done = ::pwrite(fd_.get(), data.data(), some, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EINVAL && leave_direct()) continue;
    if (done <= 0) fail_at(done < 0 ? errno : EIO, "writing", offset, data.size());
    const auto count = static_cast<size_t>(done);
    if (count % io_alignment && count < data.size()) leave_direct();
    offset += count;
    data = data.subspan(count);
  }
}

// The disk may report an earlier write's failure at any of these.
void OutFile::finish(uint64_t bytes) {
  while (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) fail_errno(errno, format_text("{}: setting its length to {}", shown_, bytes));
  while (::fsync(fd_.get()) != 0)
    if (errno != EINTR) fail_errno(errno, format_text("{}: bringing it to the disk", shown_));
  if (::close(fd_.release()) != 0 && errno != EINTR) fail_errno(errno, format_text("{}: closing it", shown_));
}

}  // namespace fsdp::checkpoint
