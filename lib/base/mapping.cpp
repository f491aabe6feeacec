// SPDX-License-Identifier: Apache-2.0

#include "base/mapping.h"

#include <link.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/error.h"

namespace fsdp {

namespace {

std::byte *map(const Fd &file, uint64_t bytes, int protection, int flags) {
  void *data = ::mmap(nullptr, bytes, protection, flags, file.get(), 0);
  if (data == MAP_FAILED) return nullptr;
  ::madvise(data, bytes, MADV_DONTFORK);  // the child of a fork must not be able to write to it
  return static_cast<std::byte *>(data);
}

}  // namespace

// If the process locks all its mappings (mlockall), the kernel would copy writable pages immediately. So the pages
// become writable only after they are unlocked.
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

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace fsdp {
namespace {

constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;

int protection(Access access) {
  switch (access) {
    case Access::none: return PROT_NONE;
    case Access::read: return PROT_READ;
    case Access::read_write: return PROT_READ | PROT_WRITE;
  }
  return PROT_NONE;
}

// The available memory as the kernel reports it, or the largest number if it does not.
uint64_t available_memory() {
  FILE *file = std::fopen("/proc/meminfo", "re");
  if (!file) return UINT64_MAX;
  char line[160];
  unsigned long long kib = 0;
  uint64_t bytes = UINT64_MAX;
  while (std::fgets(line, sizeof line, file))
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) bytes = kib * 1024;
  std::fclose(file);
  return bytes;
}

// A memfd has no limit of its own. Without this check the kernel would end the process: with the OOM killer if the size
// does not fit into memory, and with SIGXFSZ if it is above the file size limit.
void check_room(uint64_t bytes, const std::string &what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur)
    throw Error(FSDP_OUT_OF_MEMORY,
                format_text("{}: {} bytes of shared memory exceed the file size limit (ulimit -f) of {} bytes", what,
                            bytes, static_cast<uint64_t>(limit.rlim_cur)),
                -1, FSDP_ORIGIN_OS, EFBIG);
  const uint64_t available = available_memory();
  if (bytes > available)
    throw Error(FSDP_OUT_OF_MEMORY,
                format_text("{}: {} bytes of shared memory, the system has {} available", what, bytes, available), -1,
                FSDP_ORIGIN_OS, ENOMEM);
}

void allocate(const Fd &file, uint64_t bytes, const std::string &what) {
  // The memory is allocated in pieces, because a signal makes the kernel undo the whole fallocate() call.
  constexpr uint64_t piece = uint64_t{256} << 20;
  for (uint64_t offset = 0; offset < bytes;) {
    const uint64_t length = std::min(piece, bytes - offset);
    if (::fallocate(file.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(length)) == 0) {
      offset += length;
    } else if (errno != EINTR) {
      const int code = errno == ENOSPC ? ENOMEM : errno;
      fail_errno(code, format_text("{}: allocating {} bytes of shared memory", what, bytes));
    }
  }
}

void touch(std::byte *data, uint64_t bytes, Access access) {
  for (uint64_t at = 0; at < bytes; at += page_size()) {
    std::atomic_ref<unsigned char> byte(reinterpret_cast<unsigned char &>(data[at]));
    if (access == Access::read_write)
      byte.fetch_or(0, std::memory_order_relaxed);
    else
      byte.load(std::memory_order_relaxed);
  }
}

}  // namespace

uint64_t page_size() noexcept {
  static const uint64_t size = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

Fd create_memory_file(uint64_t bytes, const std::string &what) {
  check_room(bytes, what);
  Fd file(::memfd_create("fsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) fail_errno(errno, format_text("{}: memfd_create", what));
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    fail_errno(errno, format_text("{}: setting the size of the shared memory to {} bytes", what, bytes));
  allocate(file, bytes, what);
  if (::fcntl(file.get(), F_ADD_SEALS, size_seals) != 0)
    fail_errno(errno, format_text("{}: sealing the shared memory", what));
  return file;
}

void check_memory_file(const Fd &file, uint64_t bytes, const std::string &what) {
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & size_seals) != size_seals)
    fail(FSDP_SYSTEM, "{}: the shared memory that a peer passed is not sealed against changes of its size", what);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail_errno(errno, format_text("{}: fstat of the shared memory", what));
  if (static_cast<uint64_t>(status.st_size) != bytes)
    fail(FSDP_SYSTEM, "{}: the shared memory that a peer passed has {} bytes, {} are expected", what,
         static_cast<uint64_t>(status.st_size), bytes);
}

Mapping::Mapping(const Fd &file, uint64_t bytes, Access access, const std::string &what)
    : data_(map_view(file, bytes, protection(access))), bytes_(bytes) {
  if (!data_) fail_errno(errno, format_text("{}: mapping {} bytes of shared memory", what, bytes));
}

Mapping Mapping::copy_on_write(const Fd &file, uint64_t bytes, const std::string &what) {
  Mapping view;
  view.data_ = map_private_view(file, bytes);
  if (!view.data_)
    fail_errno(errno,
               format_text("{}: mapping {} bytes of shared memory in pages that are copied when they are written", what,
                           bytes));
  view.bytes_ = bytes;
  view.copies_ = true;
  return view;
}

Mapping::Mapping(Mapping &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), copies_(other.copies_) {}

Mapping &Mapping::operator=(Mapping &&other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(copies_, other.copies_);
  return *this;
}

Mapping::~Mapping() {
  if (data_) copies_ ? unmap_private_view(data_, bytes_) : unmap_view(data_, bytes_);
}

void Mapping::set_access(uint64_t offset, uint64_t bytes, Access access, const std::string &what) {
  if ((views_are_protected || copies_) && ::mprotect(data_ + offset, bytes, protection(access)) != 0)
    fail_errno(errno, format_text("{}: changing the access to {} bytes", what, bytes));
}

void Mapping::populate(uint64_t offset, uint64_t bytes, Access access, const std::string &what) {
  const int advice = access == Access::read_write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  while (::madvise(data_ + offset, bytes, advice) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) fail_errno(errno, format_text("{}: populating {} bytes of shared memory", what, bytes));
    return touch(data_ + offset, bytes, access);  // on a kernel before 5.14
  }
}

}  // namespace fsdp

// The headers of some supported systems lack this constant; an older kernel answers EINVAL.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace fsdp {
namespace {

constexpr uintptr_t max_bytes = 64u << 20;

struct CodeSegment {
  uintptr_t inside, begin, end;
};

// Finds the readable segment of code that contains `inside`.
int find_segment(dl_phdr_info *object, size_t, void *data) {
  CodeSegment &segment = *static_cast<CodeSegment *>(data);
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto &header = object->dlpi_phdr[i];
    const uintptr_t begin = object->dlpi_addr + header.p_vaddr;
    if (header.p_type != PT_LOAD || !(header.p_flags & PF_X) || !(header.p_flags & PF_R)) continue;
    if (segment.inside < begin || segment.inside >= begin + header.p_filesz) continue;
    segment.begin = begin;
    segment.end = begin + header.p_filesz;
    return 1;
  }
  return 0;
}

// Returns false if this kernel has no such call. Other errors are ignored, because a page that cannot be read fails
// when it is run.
bool populate_by_kernel(uintptr_t begin, uintptr_t end) {
  int result = 0;
  do result = madvise(reinterpret_cast<void *>(begin), end - begin, MADV_POPULATE_READ);
  while (result != 0 && errno == EINTR);
  return result == 0 || errno != EINVAL;
}

}  // namespace

void populate_machine_code() {
  CodeSegment segment{reinterpret_cast<uintptr_t>(&populate_machine_code), 0, 0};
  if (dl_iterate_phdr(find_segment, &segment) == 0 || segment.end - segment.begin > max_bytes) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = segment.begin / page * page;
  if (populate_by_kernel(begin, segment.end)) return;
  for (uintptr_t at = begin; at < segment.end; at += page) static_cast<void>(*reinterpret_cast<volatile char *>(at));
}

}  // namespace fsdp
