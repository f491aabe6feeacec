// SPDX-License-Identifier: Apache-2.0
#include "membership/wire/frame_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/failure.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {
namespace {

constexpr size_t chunk_bytes = 16384;

}  // namespace

void FrameStream::end(std::string problem, int code) {
  if (!problem_.empty()) return;
  problem_ = std::move(problem);
  code_ = code;
}

void FrameStream::queue(uint32_t kind, std::span<const std::byte> body) { queue(share_frame(write_frame(kind, body))); }

const StreamKeys &FrameStream::keys() const {
  if (!keys_) fail(FSDP_INTERNAL, "a frame on a connection that has proven nothing");
  return *keys_;
}

// Sends a piece of the first frame and its tag.
ssize_t FrameStream::send_some() {
  const WholeFrame &frame = *out_.front();
  if (sent_ == 0) out_tag_ = tag_of(keys().out, said_, frame.head(), frame.body);
  const size_t of_frame = std::min(sent_, frame.bytes.size()), of_tag = sent_ - of_frame;
  iovec parts[] = {{const_cast<std::byte *>(frame.bytes.data()) + of_frame, frame.bytes.size() - of_frame},
                   {out_tag_.data() + of_tag, out_tag_.size() - of_tag}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = std::size(parts);
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
}

bool FrameStream::flush() {
  while (!out_.empty() && speaks()) {
    const ssize_t count = send_some();
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return false;
    if (count < 0) {
      end(format_text("the connection ended: {}", std::strerror(errno)), errno);
      return false;
    }
    sent_ += static_cast<size_t>(count);
    if (sent_ < out_.front()->bytes.size() + out_tag_.size()) continue;
    out_.pop_front();
    sent_ = 0;
    ++said_;
  }
  return out_.empty();
}

// Returns 0 if nothing has arrived yet, or the stream has ended.
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
    const std::string wrong = read_head(head_bytes_, max_bytes_, head_);
    if (!wrong.empty()) return end_changed(wrong);
  }
  while (body_.size() < head_.body_bytes) {
    std::byte chunk[chunk_bytes];
    const size_t count = read_some(chunk, std::min(sizeof chunk, head_.body_bytes - body_.size()));
    if (count == 0) return;
    body_.insert(body_.end(), chunk, chunk + count);
  }
  while (tag_got_ < tag_.size()) {
    const size_t count = read_some(reinterpret_cast<std::byte *>(tag_.data()) + tag_got_, tag_.size() - tag_got_);
    if (count == 0) return;
    tag_got_ += count;
  }
}

// Whatever the cause is, nothing that arrives later on the stream is believed.
void FrameStream::end_changed(std::string problem) {
  heard_all_ = true;
  end(std::move(problem), EBADMSG);
}

std::optional<Frame> FrameStream::receive() {
  const Digest &key = keys().in;
  if (heard_all_) return {};
  fill();
  if (heard_all_ || tag_got_ < tag_.size()) return {};
  if (!equal(tag_, tag_of(key, heard_, head_bytes_, digest_of(body_)))) {
    end_changed("what came was not said by the other end, or in another order: it was changed on its way");
    return {};
  }
  Frame frame{head_.kind, std::move(body_)};
  body_.clear();
  head_got_ = tag_got_ = 0;
  ++heard_;
  return frame;
}

bool FrameStream::send(uint32_t kind, std::span<const std::byte> body, const Limit &limit) {
  queue(kind, body);
  while (!flush()) {
    if (!open() || limit.over()) return false;
    limit.waiter.poll();
    await_room(socket_, limit.look_ms);
  }
  return true;
}

std::optional<Frame> FrameStream::receive(const Limit &limit) {
  for (;;) {
    if (auto frame = receive()) return frame;
    if (!open() || limit.over()) return {};
    limit.waiter.poll();
    await_readable(socket_, limit.look_ms);
  }
}

}  // namespace fsdp::membership
