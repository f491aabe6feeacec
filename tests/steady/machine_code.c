/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In a process that runs ranks, all pages of the library's machine code are in memory, as /proc/self/pagemap shows. A
 * rarely used path then causes no page fault in a later step. A planning context loads no pages.
 */
#include <fcntl.h>
#include <link.h>
#include <string.h>
#include <unistd.h>

#include "../abi/check.h"

typedef struct segment {
  uintptr_t begin, end;
} segment;

static int find_code(struct dl_phdr_info *object, size_t size, void *found) {
  (void)size;
  if (!strstr(object->dlpi_name, "libfsdp.so")) return 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr) *header = &object->dlpi_phdr[i];
    if (header->p_type != PT_LOAD || !(header->p_flags & PF_X)) continue;
    ((segment *)found)->begin = object->dlpi_addr + header->p_vaddr;
    ((segment *)found)->end = object->dlpi_addr + header->p_vaddr + header->p_memsz;
  }
  return 1;
}

/* Bit 63 of a page's word says that the page is in this process's memory. */
static int count_absent(segment code) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return -1;
  int absent = 0;
  for (uintptr_t number = code.begin / page; number <= (code.end - 1) / page; ++number) {
    uint64_t word = 0;
    CHECK(pread(map, &word, sizeof word, (off_t)(number * sizeof word)) == sizeof word);
    absent += !(word >> 63);
  }
  close(map);
  return absent;
}

int main(void) {
  segment code = {0, 0};
  fsdp_context *context = NULL, *planning = NULL;
  dl_iterate_phdr(find_code, &code);
  if (!code.begin || count_absent(code) < 0) {
    printf("1..0 # SKIP no libfsdp.so, or no /proc/self/pagemap\n");
    return 0;
  }
  OK(fsdp_create_plan_context(1, 0, NULL, &planning));
  const int before = count_absent(code);
  OK(fsdp_create_local_contexts(1, NULL, &context));
  const int after = count_absent(code);
  printf("1..2\n# pages that are absent: %d while planning, %d where a rank runs\n", before, after);
  /* If the kernel maps whole files at once, the test can show nothing. */
  printf("ok 1 - a plan does without most of the machine code%s\n", before > 0 ? "" : " # SKIP it does not here");
  printf("%s 2 - a rank has all of it in memory\n", after == 0 ? "ok" : "not ok");
  fsdp_destroy_context(context);
  fsdp_destroy_context(planning);
  return 0;
}
