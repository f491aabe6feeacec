// SPDX-License-Identifier: Apache-2.0
// One memory file in two views: one view shows the whole file for reading, and in the other view this rank's part is
// writable. There may be a third view for the caller (PrivateView); without it, the caller gets the first view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/mapping.h"
#include "transport/team.h"

namespace fsdp::transport {

// A view of a memory file into which the caller may write by mistake. A page that was not written shows the file's
// bytes. A write copies the page for this view only. The view's page is then outdated until it is restored.

class PrivateView {
 public:
  // `pagemap` is the file in which the kernel tells which pages are copies. If the kernel does not tell, all pages are
  // restored.
  PrivateView(const Fd &file, uint64_t bytes, const std::string &what, const char *pagemap = "/proc/self/pagemap");

  std::byte *data() const noexcept { return mapping_.data(); }
  Mapping &mapping() noexcept { return mapping_; }
  bool finds_copies() const noexcept { return static_cast<bool>(pagemap_); }
  // Makes written pages show the file again. The range is whole pages. Throws SYSTEM if a system call fails.
  void restore(uint64_t offset, uint64_t bytes, const std::string &what) const;

 private:
  bool tells_copies() const;
  uint64_t read_entries(uint64_t page, std::span<uint64_t> entries, const std::string &what) const;
  void give_back(uint64_t offset, uint64_t bytes, const std::string &what) const;

  Mapping mapping_;
  Fd pagemap_;
};

class ShmArena final : public Arena {
 public:
  ShmArena(const Fd &file, uint64_t bytes, std::span<const Range> writable, std::string what, View view);

  const std::byte *data() const noexcept override { return readable_.data(); }
  uint64_t size_bytes() const noexcept override { return bytes_; }
  std::byte *writable() const noexcept override { return writable_.data(); }
  const std::byte *shown() const noexcept override { return shown_ ? shown_->data() : data(); }
  void protect(uint64_t offset, uint64_t bytes, bool readable) override;
  void protect_own(uint64_t offset, uint64_t bytes, Access access) override;
  bool protects() const noexcept override { return true; }
  void restore(uint64_t offset, uint64_t bytes) override;
  bool restores() const noexcept override { return shown_.has_value(); }

 private:
  void set_access(Mapping &view, uint64_t offset, uint64_t bytes, Access access);

  std::string what_;
  uint64_t bytes_;  // requested size; the views are whole pages
  Mapping readable_;
  Mapping writable_;
  std::optional<PrivateView> shown_;
};

// The whole pages that contain the ranges, in order and without overlap. Throws if a range is outside [0, bytes).
std::vector<Range> whole_pages(std::span<const Range> ranges, uint64_t bytes, const std::string &what);

}  // namespace fsdp::transport
