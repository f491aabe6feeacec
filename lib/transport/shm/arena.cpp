// SPDX-License-Identifier: Apache-2.0

#include "transport/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <vector>

#include "base/checked.h"
#include "base/error.h"

namespace fsdp::transport {

namespace {

// Bits of an entry of pagemap (the kernel's admin-guide/mm/pagemap.rst). If a page in a view of a file does not belong
// to the file, it is a copy, which may be in the kernel's swap space.
constexpr uint64_t present = uint64_t{1} << 63, swapped = uint64_t{1} << 62, of_file = uint64_t{1} << 61;

bool is_copy(uint64_t entry) { return (entry & (present | swapped)) && !(entry & of_file); }

uint64_t page_number(const void *address) { return reinterpret_cast<uintptr_t>(address) / page_size(); }

// Reads as many entries, starting at that page, as the kernel returns. Returns -1 and sets errno on failure.
ssize_t read_pagemap(const Fd &file, uint64_t page, std::span<uint64_t> entries) {
  ssize_t bytes = 0;
  do bytes = ::pread(file.get(), entries.data(), entries.size_bytes(), static_cast<off_t>(page * sizeof(uint64_t)));
  while (bytes < 0 && errno == EINTR);
  return bytes < 0 ? bytes : bytes / static_cast<ssize_t>(sizeof(uint64_t));
}

[[noreturn]] void fail_call(int code, const std::string &what) {
  throw Error(FSDP_SYSTEM, format_text("{}: {}", what, std::generic_category().message(code)), -1, FSDP_ORIGIN_OS,
              code);
}

}  // namespace

PrivateView::PrivateView(const Fd &file, uint64_t bytes, const std::string &what, const char *pagemap)
    : mapping_(Mapping::copy_on_write(file, bytes, what)) {
  mapping_.populate(0, bytes, Access::read, what);
  pagemap_ = Fd(::open(pagemap, O_RDONLY | O_CLOEXEC));
  if (pagemap_ && !tells_copies()) pagemap_.reset();
}

// Checks whether pagemap distinguishes a page of the file from a page of this thread's stack, which belongs to no file.
// On some systems pagemap is empty.
bool PrivateView::tells_copies() const {
  const volatile std::byte seen = *static_cast<volatile std::byte *>(data());
  uint64_t shared = 0, own = 0;
  return read_pagemap(pagemap_, page_number(data()), {&shared, 1}) == 1 &&
         read_pagemap(pagemap_, page_number(const_cast<std::byte *>(&seen)), {&own, 1}) == 1 && (shared & present) &&
         (shared & of_file) && is_copy(own);
}

uint64_t PrivateView::read_entries(uint64_t page, std::span<uint64_t> entries, const std::string &what) const {
  const ssize_t count = read_pagemap(pagemap_, page_number(data()) + page, entries);
  if (count <= 0)
    fail_call(count < 0 ? errno : EIO,
              format_text("{}: reading from /proc/self/pagemap which of {} pages of a view were written", what,
                          entries.size()));
  return static_cast<uint64_t>(count);
}

void PrivateView::restore(uint64_t offset, uint64_t bytes, const std::string &what) const {
  if (!pagemap_) return give_back(offset, bytes, what);
  std::array<uint64_t, 1024> entries;
  const uint64_t page = page_size(), end = (offset + bytes) / page;
  uint64_t copies = 0;  // number of copied pages just before the page that is being checked
  const auto give_back_copies = [&](uint64_t at) {
    if (copies) give_back((at - copies) * page, copies * page, what);
    copies = 0;
  };
  for (uint64_t at = offset / page; at < end;) {
    const uint64_t count = read_entries(at, std::span(entries).first(std::min(end - at, entries.size())), what);
    for (uint64_t i = 0; i < count; ++i, ++at)
      if (is_copy(entries[i]))
        ++copies;
      else
        give_back_copies(at);
  }
  give_back_copies(end);
}

// The kernel does not drop locked pages, so they are unlocked first; these pages need not be locked.
void PrivateView::give_back(uint64_t offset, uint64_t bytes, const std::string &what) const {
  if (::madvise(data() + offset, bytes, MADV_DONTNEED) == 0) return;
  if (errno == EINVAL && ::munlock(data() + offset, bytes) == 0 &&
      ::madvise(data() + offset, bytes, MADV_DONTNEED) == 0)
    return;
  fail_call(errno, format_text("{}: giving back {} bytes of a view that were written (madvise)", what, bytes));
}

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
