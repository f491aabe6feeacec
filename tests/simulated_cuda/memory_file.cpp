// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>
#include <vector>

#include "simulated_cuda/memory.h"

namespace simulated {
namespace {

constexpr size_t kept_size = size_t{2} << 20;  // nearly all files have this size
constexpr size_t max_kept = 32;

// Keeps files without an owner for reuse.
class KeptFiles {
 public:
  ~KeptFiles() {
    for (const int file : files_) close(file);
  }
  int take() {
    const std::lock_guard lock(mutex_);
    if (files_.empty()) return -1;
    const int file = files_.back();
    files_.pop_back();
    return file;
  }
  bool keep(int file) {
    const std::lock_guard lock(mutex_);
    if (files_.size() == max_kept) return false;
    files_.push_back(file);
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<int> files_;
};

KeptFiles &kept_files() {
  static KeptFiles files;
  return files;
}

// Fills the file by system calls, which take a tenth of the time of the page faults of a mapping.
bool fill(int file, size_t size) {
  static const std::vector<char> bytes(kept_size, static_cast<char>(unwritten));
  for (size_t at = 0; at < size;) {
    const ssize_t written = pwrite(file, bytes.data(), std::min(kept_size, size - at), static_cast<off_t>(at));
    if (written > 0)
      at += static_cast<size_t>(written);
    else if (written == 0 || errno != EINTR)
      return false;
  }
  return true;
}

}  // namespace

MemoryFile::MemoryFile(size_t size) : size_(size) {
  if (size == kept_size) number_ = kept_files().take();
  if (number_ < 0) number_ = memfd_create("simulated_cuda", MFD_CLOEXEC);
  if (number_ < 0 || fill(number_, size)) return;
  close(number_);
  number_ = -1;
}

MemoryFile::MemoryFile(Imported, int file) : number_(fcntl(file, F_DUPFD_CLOEXEC, 0)), shared_(true) {}

MemoryFile MemoryFile::imported(int file) { return {Imported{}, file}; }

MemoryFile::MemoryFile(MemoryFile &&from) noexcept
    : number_(std::exchange(from.number_, -1)), size_(from.size_), shared_(from.shared_.load()) {}

MemoryFile::~MemoryFile() {
  if (number_ < 0) return;
  if (shared_ || size_ != kept_size || !kept_files().keep(number_)) close(number_);
}

int MemoryFile::exported() {
  shared_ = true;
  return fcntl(number_, F_DUPFD_CLOEXEC, 0);
}

}  // namespace simulated
