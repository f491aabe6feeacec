// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

namespace simulated {
namespace {

constexpr size_t page = 4096;

size_t whole_pages(size_t bytes) { return (bytes + page - 1) / page * page; }

uintptr_t number(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

void *Memory::allocate(int device, size_t bytes) {
  const size_t mapped = whole_pages(bytes) + 2 * page;
  void *all = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char *begin = static_cast<char *>(all) + page;
  if (mprotect(begin, mapped - 2 * page, PROT_READ | PROT_WRITE) != 0) {
    munmap(all, mapped);
    return nullptr;
  }
  std::memset(begin, unwritten, bytes);
  const std::unique_lock lock(mutex_);
  device_[number(begin)] = {bytes, device, mapped};
  reserved_[number(all)] = {mapped, device, mapped};
  return begin;
}

size_t Memory::free(void *pointer) {
  const std::unique_lock lock(mutex_);
  const auto found = device_.find(number(pointer));
  if (found == device_.end() || found->second.mapped == 0) return 0;
  const size_t bytes = found->second.size;
  // The addresses stay reserved, so that later accesses fault.
  mmap(pointer, whole_pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  device_.erase(found);
  return bytes;
}

void *Memory::allocate_pinned(int device, size_t bytes) {
  void *pointer = std::aligned_alloc(page, whole_pages(bytes));
  if (!pointer) return nullptr;
  std::memset(pointer, unwritten, bytes);
  const std::unique_lock lock(mutex_);
  pinned_[number(pointer)] = {bytes, device, 0, true};
  return pointer;
}

bool Memory::free_pinned(void *pointer) {
  const std::unique_lock lock(mutex_);
  const auto found = pinned_.find(number(pointer));
  if (found == pinned_.end() || !found->second.allocated) return false;
  pinned_.erase(found);
  std::free(pointer);
  return true;
}

bool Memory::register_pinned(int device, void *pointer, size_t bytes) {
  const std::unique_lock lock(mutex_);
  if (overlaps(pinned_, number(pointer), bytes)) return false;
  pinned_[number(pointer)] = {bytes, device};
  return true;
}

bool Memory::unregister_pinned(void *pointer) {
  const std::unique_lock lock(mutex_);
  const auto found = pinned_.find(number(pointer));
  if (found == pinned_.end() || found->second.allocated) return false;
  pinned_.erase(found);
  return true;
}

void Memory::reserve(void *pointer, size_t bytes, int device) {
  const std::unique_lock lock(mutex_);
  reserved_[number(pointer)] = {bytes, device};
}

void Memory::release(void *pointer) {
  const std::unique_lock lock(mutex_);
  reserved_.erase(number(pointer));
}

void Memory::map(void *pointer, size_t bytes, int device, uint32_t readers) {
  const std::unique_lock lock(mutex_);
  device_[number(pointer)] = {bytes, device, 0, false, readers};
}

bool Memory::unmap(void *pointer, size_t bytes) {
  const std::unique_lock lock(mutex_);
  const auto found = device_.find(number(pointer));
  if (found == device_.end() || found->second.mapped != 0 || found->second.size != bytes) return false;
  device_.erase(found);
  return true;
}

const Memory::Ranges::value_type *Memory::at(const Ranges &ranges, uintptr_t address) {
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return nullptr;
  --next;
  return address - next->first < next->second.size ? &*next : nullptr;
}

bool Memory::overlaps(const Ranges &ranges, uintptr_t begin, size_t bytes) {
  const auto next = ranges.lower_bound(begin);
  return at(ranges, begin) || (next != ranges.end() && next->first - begin < bytes);
}

Place Memory::find(const void *pointer, size_t bytes) const {
  const std::shared_lock lock(mutex_);
  const uintptr_t address = number(pointer);
  const auto place = [&](Place::Kind kind, const Ranges::value_type &range) {
    const bool inside = bytes <= range.second.size - (address - range.first);
    return Place{kind,
                 range.second.device,
                 inside,
                 range.first,
                 range.second.size,
                 range.second.allocated,
                 range.second.readers};
  };
  if (const auto *range = at(device_, address)) return place(Place::device, *range);
  if (const auto *range = at(pinned_, address)) return place(Place::pinned, *range);
  if (const auto *range = at(reserved_, address)) return {Place::device, range->second.device, false};
  return {Place::pageable, -1, !overlaps(pinned_, address, bytes) && !overlaps(reserved_, address, bytes)};
}

size_t Memory::pinned_bytes() const {
  const std::shared_lock lock(mutex_);
  size_t bytes = 0;
  for (const auto &[address, range] : pinned_) bytes += range.size;
  return bytes;
}

void Memory::clear() {
  const std::unique_lock lock(mutex_);
  for (const auto &[address, range] : pinned_) {
    if (range.allocated) std::free(reinterpret_cast<void *>(address));
  }
  for (const auto &[address, range] : reserved_) munmap(reinterpret_cast<void *>(address), range.size);
  device_.clear();
  pinned_.clear();
  reserved_.clear();
}

}  // namespace simulated
