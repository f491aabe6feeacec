// SPDX-License-Identifier: Apache-2.0
// A file descriptor that its owner closes.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace fsdp {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd &operator=(Fd &&other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }

  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  // Returns an empty Fd and sets errno if the descriptor cannot be duplicated.
  Fd duplicate() const noexcept { return Fd(::fcntl(fd_, F_DUPFD_CLOEXEC, 0)); }

 private:
  int fd_ = -1;
};

// A descriptor that children of this process do not keep. A connection exists as long as any process has its
// descriptor. If the end of the connection tells peers that this process has died, a forked child with the descriptor
// (for example of a data loader) would hide the death.

// As long as this object exists, fork() closes the descriptor in the child. There is room for 1,024 descriptors in a
// process; children keep further descriptors. In a child of vfork() or posix_spawn() the exec closes the descriptor if
// it is CLOEXEC.
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
