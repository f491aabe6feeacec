// SPDX-License-Identifier: Apache-2.0
// A view of a memory file into which the caller may write by mistake. A page that was not written shows what the ranks
// write to the file; a write copies the page for this view alone, which is then stale there until it is restored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/mapping.h"

namespace fsdp::transport {

class PrivateView {
 public:
  // pagemap: where the kernel tells which pages are copies. Where it does not, all of them are restored.
  PrivateView(const Fd &file, uint64_t bytes, const std::string &what, const char *pagemap = "/proc/self/pagemap");

  std::byte *data() const noexcept { return mapping_.data(); }
  Mapping &mapping() noexcept { return mapping_; }
  bool finds_copies() const noexcept { return static_cast<bool>(pagemap_); }
  // Whole pages: those that were written are again those of the file. SYSTEM if a call of the system fails.
  void restore(uint64_t offset, uint64_t bytes, const std::string &what) const;

 private:
  bool tells_copies() const;
  uint64_t read_entries(uint64_t page, std::span<uint64_t> entries, const std::string &what) const;
  void give_back(uint64_t offset, uint64_t bytes, const std::string &what) const;

  Mapping mapping_;
  Fd pagemap_;
};

}  // namespace fsdp::transport
