// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/home_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace fsdp::engine {
namespace {

constexpr uint64_t buffer_bytes = uint64_t{1} << 20;

// A file without a name. A file system that knows no direct I/O refuses the flag with EINVAL.
Fd make_unnamed(int folder) {
  constexpr int flags = O_RDWR | O_TMPFILE | O_CLOEXEC;
  Fd file(::openat(folder, ".", flags | O_DIRECT, 0600));
  return file || errno != EINVAL ? std::move(file) : Fd(::openat(folder, ".", flags, 0600));
}

// For file systems that have no files without names: the name is removed at once.
Fd make_named(int folder) {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) return {};
  const std::string name = format_text(".fsdp-home-{:016x}", random);
  constexpr int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  Fd file(::openat(folder, name.c_str(), flags | O_DIRECT, 0600));
  if (!file && errno == EINVAL) {
    // A file system may refuse direct I/O after it has created the file.
    ::unlinkat(folder, name.c_str(), 0);
    file = Fd(::openat(folder, name.c_str(), flags, 0600));
  }
  if (file && ::unlinkat(folder, name.c_str(), 0) != 0) return {};
  return file;
}

}  // namespace

ReservedAddresses::ReservedAddresses(uint64_t bytes) : bytes_(bytes) {
  void *const data = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) fail_errno(errno, format_text("reserving {} bytes of addresses for a file", bytes));
  data_ = static_cast<std::byte *>(data);
}

ReservedAddresses::~ReservedAddresses() { ::munmap(data_, bytes_); }

HomeFile::HomeFile(const std::string &directory, uint64_t bytes, uint32_t rank)
    : rank_(rank),
      shown_(format_text("the file of home_directory '{}'", directory)),
      addresses_(bytes),
      buffer_(buffer_bytes) {
  blame([&] {
    open(directory);
    allocate(bytes);
  });
}

template <class Body>
void HomeFile::blame(Body &&body) const {
  try {
    body();
  } catch (Error &error) {
    error.rank = static_cast<int32_t>(rank_);
    throw;
  }
}

void HomeFile::open(const std::string &directory) {
  const Fd folder(::openat(AT_FDCWD, directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) fail_errno(errno, format_text("{}: opening the directory", shown_));
  file_ = make_unnamed(folder.get());
  if (!file_ && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT || errno == EINVAL))
    file_ = make_named(folder.get());
  if (!file_) fail_errno(errno, format_text("{}: creating it", shown_));
  fork_closed_ = ForkClosed(file_.get());
}

// A file system that cannot reserve room gets zeros.
void HomeFile::allocate(uint64_t bytes) {
  int code = 0;
  while ((code = ::fallocate(file_.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno) == EINTR) continue;
  if (code == EOPNOTSUPP) {
    std::ranges::fill(buffer_.bytes(), std::byte{0});
    const auto written = capture_error([&] {
      for (uint64_t done = 0; done < bytes; done += buffer_bytes)
        fsdp::write_pages(file_, done, buffer_.bytes().first(std::min(buffer_bytes, bytes - done)), shown_);
    });
    if (!written) return;
    if (written->origin_code != ENOSPC) throw *written;
    code = ENOSPC;
  }
  if (code == 0) return;
  // What a failed call has reserved or written is free again before the room is measured.
  [[maybe_unused]] const int emptied = ::ftruncate(file_.get(), 0);
  struct statvfs disk {};
  const bool known = code == ENOSPC && ::fstatvfs(file_.get(), &disk) == 0;
  const uint64_t room = known ? uint64_t{disk.f_bavail} * disk.f_frsize : 0;
  fail_errno(code, format_text("{}: reserving {} bytes{}", shown_, bytes,
                               known ? format_text(" on a disk with {} bytes free", room) : ""));
}

bool HomeFile::in_memory() const noexcept {
  struct statfs system {};
  return ::fstatfs(file_.get(), &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

void HomeFile::read_pages(uint64_t offset, std::span<std::byte> to) {
  blame([&] { fsdp::read_pages(file_, offset, to, to.size(), shown_); });
  read_bytes_.fetch_add(to.size(), std::memory_order_relaxed);
}

void HomeFile::write_pages(uint64_t offset, std::span<const std::byte> from) {
  blame([&] { fsdp::write_pages(file_, offset, from, shown_); });
  written_bytes_.fetch_add(from.size(), std::memory_order_relaxed);
}

void HomeFile::read(const std::byte *from, std::span<std::byte> to) {
  const std::lock_guard lock(mutex_);
  uint64_t offset = offset_of(from);
  while (!to.empty()) {
    const uint64_t first = page_of(offset), skipped = offset - first;
    const uint64_t some = std::min(to.size(), buffer_bytes - skipped);
    read_pages(first, buffer_.bytes().first(round_up(skipped + some, io_alignment)));
    std::memcpy(to.data(), buffer_.bytes().data() + skipped, some);
    offset += some, to = to.subspan(some);
  }
}

void HomeFile::write(std::byte *to, std::span<const std::byte> from) {
  const std::lock_guard lock(mutex_);
  uint64_t offset = offset_of(to);
  while (!from.empty()) {
    const uint64_t first = page_of(offset), skipped = offset - first;
    const uint64_t some = std::min(from.size(), buffer_bytes - skipped);
    const std::span<std::byte> pages = buffer_.bytes().first(round_up(skipped + some, io_alignment));
    const bool cuts_last = (skipped + some) % io_alignment != 0;
    if (skipped) read_pages(first, pages.first(io_alignment));
    if (cuts_last && (!skipped || pages.size() > io_alignment))
      read_pages(first + pages.size() - io_alignment, pages.last(io_alignment));
    std::memcpy(pages.data() + skipped, from.data(), some);
    write_pages(first, pages);
    offset += some, from = from.subspan(some);
  }
}

}  // namespace fsdp::engine
