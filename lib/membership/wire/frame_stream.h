// SPDX-License-Identifier: Apache-2.0
// Frames over a connected TCP socket that never blocks: endpoint.h connects, handshake.h proves the job secret, and
// then a FrameStream takes the socket and the keys. A process between the two ends cannot change, omit, repeat or add a
// frame, because each tag covers the frame's number and direction. Such a process can read frames and cut the
// connection.
#pragma once

#include <sys/types.h>

#include <array>
#include <cerrno>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "membership/wire/endpoint.h"
#include "membership/wire/frame.h"

namespace fsdp::membership {

class FrameStream {
 public:
  FrameStream() = default;
  // A frame with a body of more than max_bytes ends the stream.
  FrameStream(Fd socket, uint32_t max_bytes) : socket_(std::move(socket)), max_bytes_(max_bytes) {}
  FrameStream(Fd socket, uint32_t max_bytes, const StreamKeys &keys) : FrameStream(std::move(socket), max_bytes) {
    guard(keys);
  }
  // Takes the keys of the connection's handshake. Must be called before anything is sent or received.
  void guard(const StreamKeys &keys) { keys_ = keys; }

  const Fd &socket() const noexcept { return socket_; }
  explicit operator bool() const noexcept { return static_cast<bool>(socket_); }
  // False once the other end has closed, or once wrong bytes arrived; problem() says which. Earlier frames can still be
  // received, because a writer may learn of the end before a reader has read the last frames.
  bool open() const noexcept { return problem_.empty(); }
  const std::string &problem() const noexcept { return problem_; }
  // Why the stream has ended: 0 if the other end closed it, EBADMSG if bytes were changed in transit, else errno.
  int code() const noexcept { return code_; }
  // Can this end still send? It can even after it has received changed bytes, so that it can tell why it ends.
  bool speaks() const noexcept { return open() || code_ == EBADMSG; }

  // -- never waiting --
  void queue(uint32_t kind, std::span<const std::byte> body);
  void queue(SharedFrame frame) { out_.push_back(std::move(frame)); }
  // Sends as much as the socket accepts; returns true when nothing is left.
  bool flush();
  bool sending() const noexcept { return !out_.empty(); }
  // The next frame, if it is complete.
  std::optional<Frame> receive();

  // -- waiting: throws the waiter's errors --
  // Returns false or nothing if the stream has ended or the limit is over (open() tells which).
  bool send(uint32_t kind, std::span<const std::byte> body, const Limit &limit);
  std::optional<Frame> receive(const Limit &limit);

 private:
  void fill();
  size_t read_some(std::byte *to, size_t bytes);
  const StreamKeys &keys() const;
  ssize_t send_some();
  void end_changed(std::string problem);
  void end(std::string problem, int code);

  Fd socket_;
  uint32_t max_bytes_ = 0;
  std::optional<StreamKeys> keys_;
  std::string problem_;
  int code_ = 0;
  bool heard_all_ = false;  // nothing more is read
  std::array<std::byte, FrameHead::size_bytes> head_bytes_{};
  size_t head_got_ = 0;
  FrameHead head_;
  std::vector<std::byte> body_;  // grows with the received bytes, not with the announced size
  Digest tag_{};
  size_t tag_got_ = 0;
  uint64_t heard_ = 0, said_ = 0;  // numbers of frames received and sent
  std::deque<SharedFrame> out_;
  Digest out_tag_{};  // tag of the first frame in out_, set once that frame is being sent
  size_t sent_ = 0;   // sent bytes of that frame and its tag
};

}  // namespace fsdp::membership
