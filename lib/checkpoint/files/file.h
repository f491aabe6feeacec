// SPDX-License-Identifier: Apache-2.0
// The files of checkpoints, read and written by direct I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/direct_io.h"
#include "base/fd.h"

namespace fsdp::checkpoint {

// A file of a checkpoint, from which parts are read, bypassing the page cache if the file system supports that. Caches
// of other programs consist of links, which are followed. In our checkpoints a link is damage, and is refused.
enum class LinkPolicy : uint8_t { refused, followed };

class InFile {
 public:
  // Opens a name in an open folder. Refuses everything that is no regular file, and also links unless they are
  // followed. `shown` is the path for messages. All functions throw SYSTEM with the path, the action and its bytes, and
  // errno.
  InFile(int folder, const std::string &name, std::string shown, LinkPolicy links = LinkPolicy::refused);

  uint64_t bytes() const { return bytes_; }
  const std::string &shown() const { return shown_; }
  // Reads bytes [offset, offset + count) and returns them as a part of `buffer`, which must be the buffer of an
  // AlignedBytes with room for needed_for(offset, count). The range must be within the file's size at the time of
  // opening.
  std::span<const std::byte> read(uint64_t offset, uint64_t count, std::span<std::byte> buffer) const;
  static uint64_t needed_for(uint64_t offset, uint64_t count);

 private:
  std::string shown_;
  Fd fd_;
  uint64_t bytes_ = 0;
};

// A new file of a checkpoint. It is written by direct I/O, bypassing the page cache, if the file system supports that.
// If not, it is written through the cache and then to the disk.

class OutFile {
 public:
  // Creates the file in an open folder, under a plain name that must not exist. `shown` is the path for messages. All
  // functions throw SYSTEM with the path, the action and its bytes, and errno.
  OutFile(int folder, const std::string &name, std::string shown);

  // Address, offset and size must be multiples of io_alignment.
  void write(uint64_t offset, std::span<const std::byte> data);
  // Cuts the file to `bytes`, closes it, and returns when all of it is on the disk.
  void finish(uint64_t bytes);
  bool is_direct() const { return fsdp::is_direct(fd_); }

 private:
  void open(int folder, const std::string &name);

  std::string shown_;
  Fd fd_;
};

// Finds the job to which a folder `.tmp-ID` belongs. The process that writes the checkpoint locks the folder's file
// `owner`, and the kernel releases the lock when that process ends in any way. The lock belongs to the open file and
// not to the process, so other threads of the process, which are other ranks, do not share it.

inline constexpr const char *owner_name = "owner";
inline constexpr std::string_view temporary_prefix = ".tmp-";
inline constexpr std::string_view unowned_prefix = ".new-";  // used until the owner file exists and is locked
// Makes the file with the text and locks it. If the file system has no locks, the file is only kept open.
Fd make_owner(int folder, const std::string &text, const std::string &shown);
// Returns the text of a folder's owner file; empty if none can be read.
std::string read_owner(int folder);
// Returns 32 hexadecimal digits that are unique.
std::string make_id();
// The name of the owner file of a folder that has its name from the start.
std::string named_owner(const std::string &id);
// Has the folder had its name from the start, and has its save not ended?
bool has_named_owner(int parent, const std::string &name);
// Does the folder belong to a job that has ended? This can be true only for folders with one of our names: for a
// `.tmp-ID` whose lock can be taken, and for folders that had no locked owner for a day. Such a folder's job ended
// while it began or ended the save, or the file system has no locks.
bool is_abandoned(int parent, const std::string &name);
// Does a folder with a named owner belong to a job that has ended? Its checkpoint may still be complete.
bool is_abandoned_with_name(int parent, const std::string &name);

}  // namespace fsdp::checkpoint
