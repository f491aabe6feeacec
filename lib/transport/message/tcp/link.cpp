// SPDX-License-Identifier: Apache-2.0

#include "transport/message/tcp/link.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"

namespace fsdp::transport::tcp {

using messages::Kind;

uint32_t sum_of(const TcpFrameHead &head) noexcept { return crc32c(0, &head, offsetof(TcpFrameHead, head_sum)); }

void seal(OutFrame &frame) noexcept {
  if (frame.sealed) return;
  frame.head.payload_sum = crc32c(0, frame.payload(), frame.head.payload_bytes);
  frame.head.head_sum = sum_of(frame.head);
  frame.sealed = true;
}

const char *find_misfit(const TcpFrameHead &head, uint32_t from, uint64_t sequence) noexcept {
  const messages::Header &header = head.header;
  if (head.magic != frame_magic || header.magic != messages::header_magic) return "what came is no frame";
  if (head.sequence != sequence) return "a frame is missing, or came twice";
  if (header.from != from) return "a frame of another rank";
  if (header.kind < Kind::call || header.kind > Kind::answer) return "a frame of an unknown kind";
  if (messages::has_place(header)) return head.payload_bytes == header.bytes ? nullptr : "a payload of another length";
  return head.payload_bytes <= messages::longest_control ? nullptr : "a frame that is too long";
}

namespace {

// The number of calls before other links have their turn. There are few calls, so that the peer reads bytes, and sums
// are made, while the bytes are still in the caches. (16 calls of up to 1 MiB each took twice the time.)
constexpr int max_reads = 2;
constexpr int max_writes = 1;
constexpr size_t max_parts = 64;  // limit of heads and payloads in one system call
constexpr uint64_t max_at_once = uint64_t{64} << 10;
constexpr size_t dropped_at_once = 16384;

// Is the connection intact, and does the kernel only lack room or memory at the moment?
bool is_later(int code) noexcept { return code == EAGAIN || code == ENOBUFS || code == ENOMEM; }

// The unsent rest of a part of a frame.
iovec part(const std::byte *from, uint64_t bytes, uint64_t gone) noexcept {
  const uint64_t skipped = std::min(gone, bytes);
  return {const_cast<std::byte *>(from) + skipped, bytes - skipped};
}

}  // namespace

Link::~Link() {
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
}

void Link::end(std::string problem, int code) {
  if (!open()) return;
  problem_ = std::move(problem);
  code_ = code;
}

// ---- sending ----

void Link::take(std::vector<OutFrame> &frames) {
  if (first_ == out_.size()) {
    out_.clear();
    first_ = 0;
    out_.swap(frames);
    return;
  }
  out_.insert(out_.end(), frames.begin(), frames.end());
  frames.clear();
}

const std::vector<OutFrame> &Link::unsent() noexcept {
  out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(first_));
  first_ = 0;
  return out_;
}

size_t Link::fill(iovec *parts, size_t most, bool words_only) noexcept {
  size_t count = 0;
  uint64_t bytes = 0;
  for (size_t i = first_; i < out_.size() && count + 2 <= most && bytes < max_at_once; ++i) {
    OutFrame &frame = out_[i];
    if (words_only && frame.head.header.kind == Kind::data) break;
    if (options_.checksum) seal(frame);
    const auto *head = reinterpret_cast<const std::byte *>(&frame.head);
    const uint64_t gone = frame.sent;
    if (gone < sizeof frame.head) parts[count++] = part(head, sizeof frame.head, gone);
    if (frame.head.payload_bytes)
      parts[count++] = part(frame.payload(), frame.head.payload_bytes, gone - std::min(gone, sizeof frame.head));
    bytes += frame.bytes() - gone;
  }
  return count;
}

void Link::note_sent(uint64_t bytes, std::vector<messages::Header> &sent) {
  while (bytes > 0) {
    OutFrame &frame = out_[first_];
    const uint64_t of_this = std::min(bytes, frame.bytes() - frame.sent);
    frame.sent += of_this;
    bytes -= of_this;
    if (!frame.done()) return;
    if (frame.data) sent.push_back(frame.head.header);
    ++first_;
  }
}

ssize_t Link::transmit(iovec *parts, size_t count) {
  if (tls_) return tls_->send(socket_, parts, count);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Link::write(std::vector<messages::Header> &sent) {
  full_ = false;
  sent.reserve(sent.size() + max_parts);  // so that recording sent frames later does not throw
  for (int i = 0; i < max_writes && writing() && open(); ++i) {
    iovec parts[max_parts];
    const ssize_t count = transmit(parts, fill(parts, max_parts));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return note_unsent(errno);
    note_sent(static_cast<uint64_t>(count), sent);
  }
}

// A peer that has ended may have sent the reason, so its messages are read first. For an error of encryption the peer
// is not responsible: it still waits for the bytes and does not end the connection, so this end does.
void Link::note_unsent(int code) {
  if (tls_ && !tls_->write_problem().empty())
    return end(format_text("what goes from rank {} to rank {} cannot be encrypted: {}", options_.rank, options_.peer,
                           tls_->write_problem()),
               code);
  full_ = is_later(code);
  cannot_write_ = !full_;
  write_code_ = full_ ? 0 : code;
}

void Link::send_last_words() {
  if (!open() || cannot_write_) return;
  iovec parts[max_parts];
  if (const size_t count = fill(parts, max_parts, true); count > 0) transmit(parts, count);
}

void Link::send_now(OutFrame &frame) const noexcept {
  if (options_.checksum) seal(frame);
  iovec parts[2] = {{&frame.head, sizeof frame.head},
                    {const_cast<std::byte *>(frame.payload()), frame.head.payload_bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t count = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count > 0) frame.sent = static_cast<uint64_t>(count);
}

bool Link::acknowledged() const noexcept {
  int bytes = 0;
  return !(tls_ && tls_->unsent()) && (::ioctl(socket_.get(), SIOCOUTQ, &bytes) != 0 || bytes == 0);
}

// ---- receiving ----

ssize_t Link::receive(iovec *parts, size_t count) {
  if (tls_) return tls_->receive(socket_, parts, count);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
}

// Called when no bytes arrived, and none will arrive.
void Link::end_reading(ssize_t count) {
  const int code = errno;
  if (tls_ && tls_->code() == EBADMSG)
    return end(format_text("what came from rank {} to rank {} was changed on its way: {}", options_.peer, options_.rank,
                           tls_->problem()),
               EBADMSG);
  if (tls_ && tls_->code()) return end(tls_->problem(), tls_->code());
  if (write_code_) return end(std::strerror(write_code_), write_code_);
  end(count == 0 ? "the peer closed the connection" : std::strerror(code), count == 0 ? ECONNRESET : code);
}

// Bytes that TLS has in memory are read completely, because polling the socket does not show them.
void Link::read(Sink &sink) {
  for (int i = 0; (i < max_reads || (tls_ && tls_->has_more())) && open(); ++i) {
    std::byte dropped[dropped_at_once];
    iovec parts[2] = {{to_ ? to_ : dropped, to_ ? left_ : std::min<uint64_t>(left_, sizeof dropped)},
                      {staged_bytes_.data() + staged_, staged_bytes_.size() - staged_}};
    // Dropped bytes are read in pieces, and bytes after them must not be read as the next frame.
    const bool all = to_ || left_ <= sizeof dropped;
    const ssize_t count = receive(parts, all ? 2 : 1);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && is_later(errno) && !(tls_ && tls_->code())) return;
    if (count <= 0) return end_reading(count);
    const auto got = static_cast<uint64_t>(count), of_chunk = std::min<uint64_t>(got, parts[0].iov_len);
    if (left_ && !advance(of_chunk, sink)) return;
    staged_ += got - of_chunk;
    if (!parse(sink)) return;
    const bool more = tls_ && tls_->has_more();
    if (!more && got < parts[0].iov_len + (all ? parts[1].iov_len : 0)) return;  // no more bytes have arrived
  }
}

// Called when the next bytes of the chunk are at their place, or dropped. Returns false if they are not the bytes that
// were sent.
bool Link::advance(uint64_t bytes, Sink &sink) {
  if (options_.checksum && to_) sum_ = crc32c(sum_, to_, bytes);
  left_ -= bytes;
  if (to_) to_ += bytes;
  if (left_ > 0) return true;
  to_ = nullptr;
  if (!placed_) return true;
  if (options_.checksum && sum_ != wanted_sum_) {
    end_changed(header_, sum_, wanted_sum_);
    return false;
  }
  placed_ = false;
  sink.arrived(header_);
  return true;
}

void Link::end_changed(const messages::Header &header, uint32_t found, uint32_t wanted) {
  const std::string what = header.kind != messages::Kind::data ? "a message"
                                                               : format_text("chunk {} of call {} ({} bytes)",
                                                                             header.chunk, header.number, header.bytes);
  end(format_text("{} from rank {} to rank {} was changed on its way: its CRC32C is {:08x}, and {:08x} was sent", what,
                  options_.peer, options_.rank, found, wanted),
      EBADMSG);
}

bool Link::check_head(const TcpFrameHead &head) {
  if (options_.checksum && sum_of(head) != head.head_sum) {
    end(format_text("the head of frame {} from rank {} to rank {} was changed on its way: its CRC32C is wrong",
                    sequence_, options_.peer, options_.rank),
        EBADMSG);
    return false;
  }
  const char *misfit = find_misfit(head, options_.peer, sequence_);
  if (misfit) end(misfit, EPROTO);
  return !misfit;
}

bool Link::parse(Sink &sink) {
  size_t at = 0;
  while (left_ == 0 && staged_ - at >= sizeof(TcpFrameHead)) {
    TcpFrameHead head;
    std::memcpy(&head, staged_bytes_.data() + at, sizeof head);
    if (!check_head(head)) return false;
    const bool placed = messages::has_place(head.header);
    if (!placed && staged_ - at < sizeof head + head.payload_bytes) break;
    ++sequence_;
    at += sizeof head;
    if (!(placed ? begin_chunk(head, sink) : parse_control(head, staged_bytes_.data() + at, sink))) return false;
    if (!placed) {
      at += head.payload_bytes;
      continue;
    }
    const uint64_t here = std::min<uint64_t>(left_, staged_ - at);
    if (to_ && here) std::memcpy(to_, staged_bytes_.data() + at, here);
    at += here;
    if (!advance(here, sink)) return false;
  }
  std::memmove(staged_bytes_.data(), staged_bytes_.data() + at, staged_ - at);
  staged_ -= at;
  return true;
}

bool Link::parse_control(const TcpFrameHead &head, const std::byte *payload, Sink &sink) {
  if (options_.checksum) {
    if (const uint32_t sum = crc32c(0, payload, head.payload_bytes); sum != head.payload_sum) {
      end_changed(head.header, sum, head.payload_sum);
      return false;
    }
  }
  if (sink.control(head.header, payload, head.payload_bytes)) return true;
  end("messages for communicators that do not exist here", EPROTO);
  return false;
}

bool Link::begin_chunk(const TcpFrameHead &head, Sink &sink) {
  const messages::Place place = sink.place(head.header);
  if (place.misfit) {
    end("a chunk for which no call waits", EPROTO);
    return false;
  }
  header_ = head.header;
  left_ = head.payload_bytes;
  sum_ = 0;
  wanted_sum_ = head.payload_sum;
  to_ = place.to;
  placed_ = place.to != nullptr;
  return true;
}

}  // namespace fsdp::transport::tcp
