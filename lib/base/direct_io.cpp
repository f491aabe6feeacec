// SPDX-License-Identifier: Apache-2.0
#include "base/direct_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace fsdp {
namespace {

// The kernel writes at most about 2 GiB at once. A smaller limit lets an interrupted process end sooner.
constexpr size_t max_at_once = size_t{1} << 30;

}  // namespace

bool is_direct(const Fd &file) noexcept {
  const int flags = ::fcntl(file.get(), F_GETFL);
  return flags >= 0 && flags & O_DIRECT;
}

bool leave_direct(const Fd &file) noexcept {
  const int flags = ::fcntl(file.get(), F_GETFL);
  return flags >= 0 && (!(flags & O_DIRECT) || ::fcntl(file.get(), F_SETFL, flags & ~O_DIRECT) == 0);
}

// Some file systems refuse direct I/O only here, or transfer a number of bytes that is no multiple of the alignment.
// Another thread may have left direct I/O just before, so a refused call is made once more in any case.

void read_pages(const Fd &file, uint64_t offset, std::span<std::byte> to, uint64_t needed, const std::string &shown) {
  bool again = true;
  for (uint64_t done = 0; done < needed;) {
    const size_t some = std::min(to.size() - done, max_at_once);
    const ssize_t got = ::pread(file.get(), to.data() + done, some, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && std::exchange(again, false) && leave_direct(file)) continue;
    if (got < 0) fail_errno(errno, format_text("{}: reading {} bytes at {}", shown, to.size() - done, offset + done));
    if (got == 0)
      throw Error(
          FSDP_SYSTEM,
          format_text("{}: ends after {} bytes; {} bytes at {} were to be read", shown, offset + done, needed, offset),
          -1, FSDP_ORIGIN_OS, EIO);
    done += static_cast<uint64_t>(got);
    if (done % io_alignment) leave_direct(file);  // the rest begins inside a page
  }
}

void write_pages(const Fd &file, uint64_t offset, std::span<const std::byte> data, const std::string &shown) {
  bool again = true;
  while (!data.empty()) {
    const size_t some = std::min(data.size(), max_at_once);
    const ssize_t done = ::pwrite(file.get(), data.data(), some, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EINVAL && std::exchange(again, false) && leave_direct(file)) continue;
    if (done <= 0)
      fail_errno(done < 0 ? errno : EIO, format_text("{}: writing {} bytes at {}", shown, data.size(), offset));
    const auto count = static_cast<size_t>(done);
    if (count % io_alignment && count < data.size()) leave_direct(file);
    offset += count;
    data = data.subspan(count);
  }
}

}  // namespace fsdp
