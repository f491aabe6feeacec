// SPDX-License-Identifier: Apache-2.0
// Memory shared by ranks: a sealed memfd (nothing of it shows in /dev/shm, nothing is left after a crash) and its
// views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/fd.h"

namespace fsdp {

// What a rank may do with pages of memory that ranks share.
enum class Access { none, read, read_write };

// How a rank shows such memory to its caller: in pages that a write faults in, or in pages that are copied when they
// are written, so that only this view changes.
enum class View { read_only, copy_on_write };

// The pages through which a rank sees a memory file: a mapping of its own, so that ranks that are threads cannot write
// what is not theirs either. Under ThreadSanitizer all of a process see a file at one address, and protections are not
// applied: races are found by address, and every rank at its own would hide those between ranks.

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

// protection as of mmap. NULL, and errno, if there is none.
std::byte *map_view(const Fd &file, uint64_t bytes, int protection);
void unmap_view(std::byte *data, uint64_t bytes) noexcept;
// One whose pages are copied when they are written (private_view.h): under ThreadSanitizer too each has its own.
std::byte *map_private_view(const Fd &file, uint64_t bytes);
void unmap_private_view(std::byte *data, uint64_t bytes) noexcept;

uint64_t page_size() noexcept;

// A memfd of `bytes` bytes, allocated in full and sealed against changes of its size. OUT_OF_MEMORY if that fails.
Fd create_memory_file(uint64_t bytes, const std::string &what);
// What came from a peer: throws unless it is sealed as above and has the size expected.
void check_memory_file(const Fd &file, uint64_t bytes, const std::string &what);

// One view of a whole memory file. Not inherited by forked children.
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
  // offset and bytes are whole pages.
  void set_access(uint64_t offset, uint64_t bytes, Access access, const std::string &what);
  // Put the pages into this view now, so that no access faults later.
  void populate(uint64_t offset, uint64_t bytes, Access access, const std::string &what);

 private:
  std::byte *data_ = nullptr;
  uint64_t bytes_ = 0;
  bool copies_ = false;
};

}  // namespace fsdp
