// SPDX-License-Identifier: Apache-2.0
// Memory shared by ranks: a sealed memfd, which is not visible in /dev/shm and leaves nothing after a crash, and views
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

// Each rank has its own mapping of a memory file. So ranks that are threads of one process cannot write each other's
// memory either. Under ThreadSanitizer all ranks of a process have a file at one address, without protection. The
// sanitizer finds races by address, so with an address for each rank it would miss races between ranks.

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
// Maps a view whose pages are copied when they are written (transport/shm/arena.h). Each view is a mapping of its own,
// also under ThreadSanitizer.
std::byte *map_private_view(const Fd &file, uint64_t bytes);
void unmap_private_view(std::byte *data, uint64_t bytes) noexcept;

uint64_t page_size() noexcept;

// Creates a memfd of `bytes` bytes, allocated in full and sealed against changes of its size. Throws OUT_OF_MEMORY if
// there is no room.
Fd create_memory_file(uint64_t bytes, const std::string &what);
// Checks a file from a peer: throws unless it is sealed like the files of create_memory_file() and has the expected
// size.
void check_memory_file(const Fd &file, uint64_t bytes, const std::string &what);

// One view of a whole memory file. Forked children do not inherit it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Fd &file, uint64_t bytes, Access access, const std::string &what);
  // Makes a readable and writable view, whose pages are copied when they are written.
  static Mapping copy_on_write(const Fd &file, uint64_t bytes, const std::string &what);
  Mapping(Mapping &&other) noexcept;
  Mapping &operator=(Mapping &&other) noexcept;
  ~Mapping();

  std::byte *data() const noexcept { return data_; }
  uint64_t size_bytes() const noexcept { return bytes_; }
  // `offset` and `bytes` must be multiples of the page size.
  void set_access(uint64_t offset, uint64_t bytes, Access access, const std::string &what);
  // Puts the pages into this view now, so that no access faults later.
  void populate(uint64_t offset, uint64_t bytes, Access access, const std::string &what);

 private:
  std::byte *data_ = nullptr;
  uint64_t bytes_ = 0;
  bool copies_ = false;
};

// The library's machine code in memory.

// Reads all of the library's machine code into memory. Otherwise the kernel maps a file's pages when they are first
// run, so a rare path, such as that of a long wait, would have page faults in a later step. Does nothing if the library
// is linked into a program of more than 64 MiB of code, because most of that code is not the library's.
void populate_machine_code();

}  // namespace fsdp
