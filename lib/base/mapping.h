// SPDX-License-Identifier: Apache-2.0
// Memory shared by ranks: a sealed memfd, which does not show in /dev/shm and leaves nothing after a crash, and views
// of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/fd.h"

namespace fsdp {

// What a rank may do with pages of memory that ranks share.
enum class Access { none, read, read_write };

// How a rank shows shared memory to its caller. A write to a read_only page faults. A copy_on_write page is copied when
// it is written, so that only this view changes.
enum class View { read_only, copy_on_write };

// A rank sees a memory file through its own mapping. So ranks that are threads of one process cannot write each other's
// memory either. Under ThreadSanitizer all ranks of a process see a file at one address, without protection. The
// sanitizer finds races by address: if each rank had its own address, it would miss races between ranks.

#if defined(__SANITIZE_THREAD__)
#define FSDP_ONE_VIEW 1
#elif defined(__has_feature)  // clang
#if __has_feature(thread_sanitizer)
#define FSDP_ONE_VIEW 1
#endif
#endif

#ifdef FSDP_ONE_VIEW
constexpr bool views_are_protected = false;
#else
constexpr bool views_are_protected = true;
#endif

// `protection` is that of mmap. Returns NULL and sets errno on failure.
std::byte *map_view(const Fd &file, uint64_t bytes, int protection);
void unmap_view(std::byte *data, uint64_t bytes) noexcept;
// Maps a view whose pages are copied when they are written (private_view.h). Each is a mapping of its own, also under
// ThreadSanitizer.
std::byte *map_private_view(const Fd &file, uint64_t bytes);
void unmap_private_view(std::byte *data, uint64_t bytes) noexcept;

uint64_t page_size() noexcept;

// Creates a memfd of `bytes` bytes, allocated in full and sealed against changes of its size. Throws OUT_OF_MEMORY if
// there is no room.
Fd create_memory_file(uint64_t bytes, const std::string &what);
// Checks a file that came from a peer: throws unless it is sealed as above and has the expected size.
void check_memory_file(const Fd &file, uint64_t bytes, const std::string &what);

// One view of a whole memory file. Forked children do not inherit it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Fd &file, uint64_t bytes, Access access, const std::string &what);
  // Readable and writable, in pages that are copied when they are written.
  static Mapping copy_on_write(const Fd &file, uint64_t bytes, const std::string &what);
  Mapping(Mapping &&other) noexcept;
  Mapping &operator=(Mapping &&other) noexcept;
  ~Mapping();

  std::byte *data() const noexcept { return data_; }
  uint64_t size_bytes() const noexcept { return bytes_; }
  // `offset` and `bytes` are multiples of the page size.
  void set_access(uint64_t offset, uint64_t bytes, Access access, const std::string &what);
  // Puts the pages into this view now, so that no access faults later.
  void populate(uint64_t offset, uint64_t bytes, Access access, const std::string &what);

 private:
  std::byte *data_ = nullptr;
  uint64_t bytes_ = 0;
  bool copies_ = false;
};

// The library's machine code as memory.

// Brings all of the library's machine code into the process's memory. The kernel maps a file's pages when they are
// first run: a rarely taken path, such as that of a long wait, would take its page faults in some later step. Nothing
// is done if the library is linked into a program of more than 64 MiB of code, since most of that is not the library's.
void populate_machine_code();

}  // namespace fsdp
