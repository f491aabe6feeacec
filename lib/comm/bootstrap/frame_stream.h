// SPDX-License-Identifier: Apache-2.0
// Frames over a connected TCP socket that never blocks: endpoint.h connects, proof.h proves the job secret, then a
// FrameStream takes the socket.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap/endpoint.h"
#include "comm/bootstrap/frame.h"

namespace fsdp::comm {

class FrameStream {
 public:
  FrameStream() = default;
  // A frame whose body is longer than most_bytes ends the stream.
  FrameStream(Fd socket, uint32_t most_bytes) : socket_(std::move(socket)), most_bytes_(most_bytes) {}

  const Fd &socket() const noexcept { return socket_; }
  explicit operator bool() const noexcept { return static_cast<bool>(socket_); }
  // False once the other end has closed, or sent what is no frame: problem() says which. Frames that came before are
  // still there: who sends learns of the end before who reads has heard the last words.
  bool open() const noexcept { return problem_.empty(); }
  const std::string &problem() const noexcept { return problem_; }
  // Of an ended stream: 0 if the other end closed it, EPROTO if it sent what is no frame, else errno.
  int code() const noexcept { return code_; }

  // -- never waiting --
  void queue(uint32_t kind, std::span<const std::byte> body);
  // Bytes of whole frames that several streams send: kept once.
  void queue(std::shared_ptr<const std::vector<std::byte>> frames);
  // Sends what goes; true when all has gone.
  bool flush();
  bool sending() const noexcept { return !out_.empty(); }
  // The next frame, if it is complete.
  std::optional<Frame> receive();

  // -- waiting: throws what the waiter does --
  // False: the stream ended, or the limit is over (open() tells).
  bool send(uint32_t kind, std::span<const std::byte> body, const Limit &limit);
  std::optional<Frame> receive(const Limit &limit);

 private:
  void fill();
  size_t read_some(std::byte *to, size_t bytes);
  void end(std::string problem, int code);

  Fd socket_;
  uint32_t most_bytes_ = 0;
  std::string problem_;
  int code_ = 0;
  bool heard_all_ = false;  // nothing more comes
  std::array<std::byte, FrameHead::size_bytes> head_bytes_{};
  size_t head_got_ = 0;
  FrameHead head_;
  std::vector<std::byte> body_;  // grows with what has come, not with what was announced
  std::deque<std::shared_ptr<const std::vector<std::byte>>> out_;
  size_t sent_ = 0;  // of the first of out_
};

}  // namespace fsdp::comm
