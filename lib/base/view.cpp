// SPDX-License-Identifier: Apache-2.0
#include "base/view.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

namespace fsdp {
namespace {

std::byte *map(const Fd &file, uint64_t bytes, int protection, int flags) {
  void *data = ::mmap(nullptr, bytes, protection, flags, file.get(), 0);
  if (data == MAP_FAILED) return nullptr;
  ::madvise(data, bytes, MADV_DONTFORK);  // contexts do not survive fork: the child must not be able to write here
  return static_cast<std::byte *>(data);
}

}  // namespace

// Where the process locks all that it maps (mlockall), pages that may be written would be copied at once: they may not
// be until they are not locked.
std::byte *map_private_view(const Fd &file, uint64_t bytes) {
  std::byte *data = map(file, bytes, PROT_READ, MAP_PRIVATE | MAP_NORESERVE);
  if (!data || (::munlock(data, bytes) == 0 && ::mprotect(data, bytes, PROT_READ | PROT_WRITE) == 0)) return data;
  const int code = errno;
  ::munmap(data, bytes);
  errno = code;
  return nullptr;
}

void unmap_private_view(std::byte *data, uint64_t bytes) noexcept { ::munmap(data, bytes); }

#ifndef FSDP_ONE_VIEW

std::byte *map_view(const Fd &file, uint64_t bytes, int protection) { return map(file, bytes, protection, MAP_SHARED); }
void unmap_view(std::byte *data, uint64_t bytes) noexcept { ::munmap(data, bytes); }

#else

namespace {

struct SharedView {
  dev_t device;
  ino_t inode;
  pid_t process;  // a forked child has the entries, not the pages
  std::byte *data;
  uint32_t users;
};

std::mutex mutex;
std::vector<SharedView> views;

}  // namespace

std::byte *map_view(const Fd &file, uint64_t bytes, int) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return nullptr;
  const std::lock_guard lock(mutex);
  for (SharedView &view : views)
    if (view.device == status.st_dev && view.inode == status.st_ino && view.process == ::getpid()) {
      ++view.users;
      return view.data;
    }
  std::byte *data = map(file, bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  if (data) views.push_back({status.st_dev, status.st_ino, ::getpid(), data, 1});
  return data;
}

void unmap_view(std::byte *data, uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex);
  const auto view = std::find_if(views.begin(), views.end(),
                                 [&](const SharedView &v) { return v.data == data && v.process == ::getpid(); });
  if (--view->users) return;
  ::munmap(data, bytes);
  views.erase(view);
}

#endif

}  // namespace fsdp
