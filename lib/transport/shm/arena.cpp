// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/arena.h"

#include <algorithm>
#include <vector>

#include "base/checked.h"

namespace fsdp::transport {

std::vector<Range> whole_pages(std::span<const Range> ranges, uint64_t bytes, const std::string &what) {
  const uint64_t page = page_size();
  std::vector<Range> sorted;
  for (const Range &range : ranges) {
    if (range.offset > bytes || range.bytes > bytes - range.offset)
      fail(FSDP_INTERNAL, "{}: the range of {} bytes at {} is outside of [0, {})", what, range.bytes, range.offset,
           bytes);
    if (range.bytes == 0) continue;
    const uint64_t begin = range.offset / page * page;
    sorted.push_back({begin, round_up(range.offset + range.bytes, page) - begin});
  }
  std::sort(sorted.begin(), sorted.end(), [](const Range &a, const Range &b) { return a.offset < b.offset; });
  std::vector<Range> pages;
  for (const Range &range : sorted) {
    if (pages.empty() || range.offset > pages.back().offset + pages.back().bytes) {
      pages.push_back(range);
    } else {
      const uint64_t end = std::max(pages.back().offset + pages.back().bytes, range.offset + range.bytes);
      pages.back().bytes = end - pages.back().offset;
    }
  }
  return pages;
}

ShmArena::ShmArena(const Fd &file, uint64_t bytes, std::span<const Range> writable, std::string what, View view)
    : what_(std::move(what)), bytes_(bytes) {
  const uint64_t mapped = round_up(bytes, page_size());
  readable_ = Mapping(file, mapped, Access::read, what_);
  writable_ = Mapping(file, mapped, Access::none, what_);
  readable_.populate(0, mapped, Access::read, what_);
  for (const Range &range : whole_pages(writable, bytes, what_)) {
    writable_.set_access(range.offset, range.bytes, Access::read_write, what_);
    writable_.populate(range.offset, range.bytes, Access::read_write, what_);
  }
  if (view == View::copy_on_write) shown_.emplace(file, mapped, what_);
}

void ShmArena::protect(uint64_t offset, uint64_t bytes, bool readable) {
  const Access shown = shown_ ? Access::read_write : Access::read;
  set_access(shown_ ? shown_->mapping() : readable_, offset, bytes, readable ? shown : Access::none);
}

void ShmArena::protect_own(uint64_t offset, uint64_t bytes, Access access) {
  set_access(writable_, offset, bytes, access);
}

void ShmArena::restore(uint64_t offset, uint64_t bytes) {
  if (!shown_) fail(FSDP_INTERNAL, "{}: restoring a view of {} bytes at {} that is read-only", what_, bytes, offset);
  if (offset + bytes > bytes_) fail(FSDP_INTERNAL, "{}: restoring {} bytes at {} of {}", what_, bytes, offset, bytes_);
  const uint64_t begin = offset / page_size() * page_size();
  shown_->restore(begin, round_up(offset + bytes, page_size()) - begin, what_);
}

void ShmArena::set_access(Mapping &view, uint64_t offset, uint64_t bytes, Access access) {
  const uint64_t page = page_size();
  const uint64_t begin = round_up(offset, page);
  const uint64_t end = (offset + bytes) / page * page;
  if (offset + bytes > bytes_) fail(FSDP_INTERNAL, "{}: protecting {} bytes at {} of {}", what_, bytes, offset, bytes_);
  if (begin >= end) return;
  view.set_access(begin, end - begin, access, what_);
}

}  // namespace fsdp::transport
