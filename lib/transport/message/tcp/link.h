// SPDX-License-Identifier: Apache-2.0
// One connection to a peer, which sends and receives frames and never waits. Reading never depends on writing, and each
// chunk is written to its place or dropped. So two ranks cannot wait for each other to read.
//
//   in:  socket --> [ rest of a chunk ] its place, without a copy
//               --> [ later bytes     ] 4 KiB of heads and short payloads, which are handled one by one
//
// A link is used by one thread, except for send_now().
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transport/message/channel/transport.h"
#include "transport/message/tcp/tls.h"

namespace fsdp::transport::tcp {

// The format of a connection between two ranks once both have proven the job's secret: frames in a fixed order, each
// with a head and its payload.

struct TcpFrameHead {
  uint32_t magic;
  uint32_t payload_bytes;
  uint64_t sequence;  // number of the frame in this direction, from 0
  messages::Header header;
  uint32_t payload_sum;  // CRC32C if the job has FSDP_NET_CHECKSUM=crc32c; if not, both sums are 0
  uint32_t head_sum;     // CRC32C of all earlier fields
};
static_assert(sizeof(TcpFrameHead) == 24 + sizeof(messages::Header));
constexpr uint32_t frame_magic = 0x66736470;

// A frame to send. Data stays at its place; a short payload is stored in the frame.
struct OutFrame {
  TcpFrameHead head;
  alignas(8) std::byte control[messages::longest_control];
  const std::byte *data = nullptr;  // NULL: the payload is in control
  uint64_t sent = 0;                // number of bytes sent, of head and payload
  bool sealed = false;              // the head has its sums

  const std::byte *payload() const noexcept { return data ? data : control; }
  uint64_t bytes() const noexcept { return sizeof(TcpFrameHead) + head.payload_bytes; }
  bool done() const noexcept { return sent == bytes(); }
};

inline OutFrame make_frame(const messages::Header &header, uint64_t sequence, uint64_t payload_bytes) noexcept {
  OutFrame frame{};
  frame.head = {frame_magic, static_cast<uint32_t>(payload_bytes), sequence, header, 0, 0};
  return frame;
}

// Sets the head's sums from the current contents. Has an effect only once.
void seal(OutFrame &frame) noexcept;
uint32_t sum_of(const TcpFrameHead &head) noexcept;

// Says what is wrong with the head; returns NULL if a peer that follows the protocol may send it.
const char *find_misfit(const TcpFrameHead &head, uint32_t from, uint64_t sequence) noexcept;

// Takes the messages that a link receives.
class Sink {
 public:
  // Returns false if the peer sends more than it may.
  virtual bool control(const messages::Header &header, const std::byte *payload, uint64_t bytes) = 0;
  virtual messages::Place place(const messages::Header &header) = 0;
  virtual void arrived(const messages::Header &header) = 0;  // a chunk that had a place has arrived

 protected:
  ~Sink() = default;
};

struct LinkOptions {
  uint32_t peer = 0;  // the peer's rank in the job
  uint32_t rank = 0;  // this rank
  bool checksum = false;
};

class Link {
 public:
  // `tls` is the TLS connection that both ends have set up, or NULL.
  Link(Fd socket, const LinkOptions &options, std::unique_ptr<Tls> tls = nullptr)
      : socket_(std::move(socket)), options_(options), tls_(std::move(tls)) {}
  ~Link();  // ends the connection, even if a child of this process has the socket
  Link(const Link &) = delete;
  Link &operator=(const Link &) = delete;

  const Fd &socket() const noexcept { return socket_; }
  bool open() const noexcept { return problem_.empty(); }
  // Did a call of write() find that the socket accepts no more bytes at the moment?
  bool full() const noexcept { return full_; }
  const std::string &problem() const noexcept { return problem_; }
  // errno; EPROTO: the received bytes do not follow the protocol; EBADMSG: they were changed in transit.
  int code() const noexcept { return code_; }
  // Appends the frames to its own, and leaves the vector empty.
  void take(std::vector<OutFrame> &frames);
  bool writing() const noexcept { return (first_ < out_.size() || (tls_ && tls_->unsent())) && !cannot_write_; }
  // Sends as much as the socket accepts, up to a limit. The headers of data that was sent completely are added to
  // `sent`.
  void write(std::vector<messages::Header> &sent);
  // Called before this rank ends the connection: sends the control messages that come before unsent data, if the socket
  // accepts them immediately.
  void send_last_words();
  // Reads the bytes that have arrived, up to a limit.
  void read(Sink &sink);
  // The chunk that has a place and has only partly arrived; NULL: there is none.
  const messages::Header *incomplete() const noexcept { return placed_ ? &header_ : nullptr; }
  // The frames that were not sent.
  const std::vector<OutFrame> &unsent() noexcept;
  // Has the peer's kernel acknowledged all bytes?
  bool acknowledged() const noexcept;
  // Sends as much of the frame as the socket accepts immediately. Must be called while no other thread writes, and not
  // with TLS. write() finds errors.
  void send_now(OutFrame &frame) const noexcept;

 private:
  void end(std::string problem, int code);
  bool advance(uint64_t bytes, Sink &sink);
  ssize_t transmit(struct iovec *parts, size_t count);
  ssize_t receive(struct iovec *parts, size_t count);
  void end_reading(ssize_t count);
  bool check_head(const TcpFrameHead &head);
  void end_changed(const messages::Header &header, uint32_t found, uint32_t wanted);
  bool parse(Sink &sink);
  bool parse_control(const TcpFrameHead &head, const std::byte *payload, Sink &sink);
  bool begin_chunk(const TcpFrameHead &head, Sink &sink);
  size_t fill(struct iovec *parts, size_t most, bool words_only = false) noexcept;
  void note_sent(uint64_t bytes, std::vector<messages::Header> &sent);
  void note_unsent(int code);

  Fd socket_;
  LinkOptions options_;
  std::unique_ptr<Tls> tls_;
  std::string problem_;
  int code_ = 0;

  std::vector<OutFrame> out_;
  size_t first_ = 0;  // index in out_ of the first frame that was not sent
  bool full_ = false;
  // The peer accepts no more bytes. Its earlier messages are still read before the link ends.
  bool cannot_write_ = false;
  int write_code_ = 0;

  std::array<std::byte, 4096> staged_bytes_{};
  size_t staged_ = 0;
  uint64_t sequence_ = 0;
  messages::Header header_{};  // header of the chunk that is arriving
  uint64_t left_ = 0;          // bytes of the chunk that have not arrived yet
  uint32_t sum_ = 0;           // CRC of the chunk's bytes so far
  uint32_t wanted_sum_ = 0;
  std::byte *to_ = nullptr;  // the place of the remaining bytes; NULL: they are dropped
  bool placed_ = false;
};

}  // namespace fsdp::transport::tcp
