// SPDX-License-Identifier: Apache-2.0
#include "base/machine_code.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

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

// Finds the readable segment of code in which `inside` lies.
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

// Returns false if this kernel has no such call. Other errors are ignored: if a page cannot be read, running it will
// show that.
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
