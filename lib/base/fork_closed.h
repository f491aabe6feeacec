// SPDX-License-Identifier: Apache-2.0
// A descriptor that children of this process do not keep. A connection lasts as long as any process has its descriptor:
// where its end tells peers that this process died, a forked child (of a data loader, say) would hide that from them.
#pragma once

#include <utility>

namespace fsdp {

// From now on until its end fork() closes this descriptor in the child. There is room for 1,024 in a process; what goes
// beyond is kept by children. One that a child of vfork() or posix_spawn() has ends with its exec, if it is CLOEXEC.
class ForkClosed {
 public:
  ForkClosed() = default;
  explicit ForkClosed(int fd) noexcept;
  ForkClosed(ForkClosed &&other) noexcept : seat_(std::exchange(other.seat_, -1)) {}
  ForkClosed &operator=(ForkClosed &&other) noexcept {
    if (this != &other) {
      end();
      seat_ = std::exchange(other.seat_, -1);
    }
    return *this;
  }
  ~ForkClosed() { end(); }

 private:
  void end() noexcept;
  int seat_ = -1;
};

}  // namespace fsdp
