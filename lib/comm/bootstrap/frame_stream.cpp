// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/frame_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/slice.h"
#include "comm/bootstrap/packet.h"

namespace fsdp::comm {
namespace {

constexpr size_t chunk_bytes = 16384;

}  // namespace

void FrameStream::end(std::string problem, int code) {
  if (!problem_.empty()) return;
  problem_ = std::move(problem);
  code_ = code;
}

void FrameStream::queue(uint32_t kind, std::span<const std::byte> body) {
  queue(std::make_shared<const std::vector<std::byte>>(write_frame(kind, body)));
}

void FrameStream::queue(std::shared_ptr<const std::vector<std::byte>> frames) {
  if (!frames->empty()) out_.push_back(std::move(frames));
}

bool FrameStream::flush() {
  while (!out_.empty() && open()) {
    const auto &bytes = *out_.front();
    const ssize_t count = ::send(socket_.get(), bytes.data() + sent_, bytes.size() - sent_, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return false;
    if (count < 0) {
      end(format_text("the connection ended: {}", std::strerror(errno)), errno);
      return false;
    }
    sent_ += static_cast<size_t>(count);
    if (sent_ < bytes.size()) continue;
    out_.pop_front();
    sent_ = 0;
  }
  return out_.empty();
}

// 0: nothing there at the moment, or the stream has ended.
size_t FrameStream::read_some(std::byte *to, size_t bytes) {
  for (;;) {
    const ssize_t count = ::recv(socket_.get(), to, bytes, 0);
    if (count > 0) return static_cast<size_t>(count);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return 0;
    end(count == 0 ? "the other end closed the connection"
                   : format_text("the connection ended: {}", std::strerror(errno)),
        count == 0 ? 0 : errno);
    heard_all_ = true;
    return 0;
  }
}

void FrameStream::fill() {
  while (head_got_ < FrameHead::size_bytes) {
    const size_t count = read_some(head_bytes_.data() + head_got_, FrameHead::size_bytes - head_got_);
    if (count == 0) return;
    head_got_ += count;
    if (head_got_ < FrameHead::size_bytes) continue;
    const std::string wrong = read_head(head_bytes_, most_bytes_, head_);
    if (wrong.empty()) continue;
    heard_all_ = true;
    return end(wrong, EPROTO);
  }
  while (body_.size() < head_.body_bytes) {
    std::byte chunk[chunk_bytes];
    const size_t count = read_some(chunk, std::min(sizeof chunk, head_.body_bytes - body_.size()));
    if (count == 0) return;
    body_.insert(body_.end(), chunk, chunk + count);
  }
}

std::optional<Frame> FrameStream::receive() {
  if (heard_all_) return {};
  fill();
  if (heard_all_ || head_got_ < FrameHead::size_bytes || body_.size() < head_.body_bytes) return {};
  Frame frame{head_.kind, std::move(body_)};
  body_.clear();
  head_got_ = 0;
  return frame;
}

bool FrameStream::send(uint32_t kind, std::span<const std::byte> body, const Limit &limit) {
  queue(kind, body);
  while (!flush()) {
    if (!open() || limit.over()) return false;
    limit.waiter.poll();
    await_room(socket_, slice_ms);
  }
  return true;
}

std::optional<Frame> FrameStream::receive(const Limit &limit) {
  for (;;) {
    if (auto frame = receive()) return frame;
    if (!open() || limit.over()) return {};
    limit.waiter.poll();
    await_readable(socket_, slice_ms);
  }
}

}  // namespace fsdp::comm
