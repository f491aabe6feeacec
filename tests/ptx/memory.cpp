// SPDX-License-Identifier: Apache-2.0
// Resolves an address in each of the four spaces.
#include <map>
#include <string>
#include <utility>

#include "ptx/warp.h"

namespace ptx {
namespace {

// Maps the beginning to the bytes. It is never destroyed, because constants may be released when the program ends.
auto &owned = *new std::map<uintptr_t, size_t>;
uintptr_t last_begin = 0, last_end = 0;  // the range that was last accessed; the next access is often there, too

bool is_owned(uintptr_t first, size_t bytes) {
  if (first < last_begin || first + bytes > last_end) {
    auto after = owned.upper_bound(first);
    if (after == owned.begin()) return false;
    --after;
    last_begin = after->first, last_end = last_begin + after->second;
  }
  return first >= last_begin && first + bytes <= last_end;
}

[[noreturn]] void refuse(const Instruction &access, const Warp &warp, uint64_t address, const char *why) {
  throw Fault(warp.block.kernel.name + ": line " + std::to_string(access.line) + ": " +
              std::to_string(access.count * access.bytes) + " bytes at " + std::to_string(address) + ": " + why);
}

}  // namespace

void own(const void *memory, size_t bytes) {
  owned[reinterpret_cast<uintptr_t>(memory)] = bytes;
  last_begin = last_end = 0;
}

void disown(const void *memory) {
  owned.erase(reinterpret_cast<uintptr_t>(memory));
  last_begin = last_end = 0;
}

GlobalConstant::GlobalConstant(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {
  own(bytes_.data(), bytes_.size());
}
GlobalConstant::~GlobalConstant() { disown(bytes_.data()); }

std::byte *reach(const Instruction &access, const Warp &warp, unsigned lane) {
  const uint32_t base = access.from[0];
  // Shared addresses have 32 bits, all others 64.
  const uint64_t address =
      (access.space == Space::shared ? uint64_t{warp.lane<uint32_t>(base)[lane]} : warp.lane<uint64_t>(base)[lane]) +
      static_cast<uint64_t>(access.offset);
  const size_t bytes = size_t{access.count} * access.bytes;
  if (address % bytes != 0) refuse(access, warp, address, "not aligned");
  const Kernel &kernel = warp.block.kernel;
  switch (access.space) {
    case Space::global:
      if (!is_owned(address, bytes)) refuse(access, warp, address, "nobody's memory");
      return reinterpret_cast<std::byte *>(address);
    case Space::parameter:
      if (address + bytes > kernel.parameter_bytes) refuse(access, warp, address, "behind the parameters");
      return const_cast<std::byte *>(warp.block.parameters) + address;
    case Space::shared:
      if (address + bytes > kernel.shared_bytes) refuse(access, warp, address, "behind the shared memory");
      return warp.block.shared.data() + address;
    case Space::local:
      if (address + bytes > kernel.local_bytes) refuse(access, warp, address, "behind the local memory");
      return warp.local + lane * kernel.local_bytes + address;
  }
  refuse(access, warp, address, "no space");
}

}  // namespace ptx
