// SPDX-License-Identifier: Apache-2.0
// One memory file in two views: the whole of it readable, and this rank's part of it writable. A third one may be for
// the caller (private_view.h); else that is shown the first.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/mapping.h"
#include "transport/shm/private_view.h"
#include "transport/team.h"

namespace fsdp::transport {

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
  uint64_t bytes_;  // as asked for; the views are whole pages
  Mapping readable_;
  Mapping writable_;
  std::optional<PrivateView> shown_;
};

// Whole pages that hold the ranges, in order, without overlap. Throws if one is outside [0, bytes).
std::vector<Range> whole_pages(std::span<const Range> ranges, uint64_t bytes, const std::string &what);

}  // namespace fsdp::transport
