// SPDX-License-Identifier: Apache-2.0
#include "device/host/memory.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"

// Newer than the headers of some supported systems; an older kernel answers EINVAL.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace fsdp::device {
namespace {

[[noreturn]] void fail_memory(uint64_t bytes, const char *what, int code) {
  throw Error(FSDP_OUT_OF_MEMORY, format_text("{}: cannot allocate {} bytes: {}", what, bytes, strerrordesc_np(code)),
              -1, FSDP_ORIGIN_OS, code);
}

// Shows up in /proc/self/maps as [anon:fsdp ...]; the kernel takes no brackets, quotes or backslashes, and 79
// characters.
void name_pages(void *data, uint64_t bytes, const char *what) {
  char name[80];
  std::snprintf(name, sizeof name, "fsdp %s", what);
  for (char *c = name; *c; ++c)
    if (std::strchr("[]\\$`", *c) || *c < ' ' || *c > '~') *c = '_';
  prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, data, bytes, name);
}

int populate(std::byte *data, uint64_t bytes) {
  int result = 0;
  do result = madvise(data, bytes, MADV_POPULATE_WRITE);
  while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return 0;
  if (errno != EINVAL) return errno;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t offset = 0; offset < bytes; offset += page)
    const_cast<volatile std::byte *>(data)[offset] = std::byte{};
  return 0;
}

}  // namespace

HostMemory::HostMemory(uint64_t bytes, const char *what) : bytes_(bytes) {
  if (bytes == 0) return;
  void *pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) fail_memory(bytes, what, errno);
  data_ = static_cast<std::byte *>(pages);
  madvise(pages, bytes, MADV_DONTFORK);
  name_pages(pages, bytes, what);
  if (const int code = populate(data_, bytes); code != 0) {
    munmap(pages, bytes);
    fail_memory(bytes, what, code);
  }
}

HostMemory::~HostMemory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace fsdp::device
