// SPDX-License-Identifier: Apache-2.0
// One connection to a peer: frames out and in, never waiting. Reading never depends on writing, and a chunk goes to its
// place or is dropped, so that no two ranks can wait for each other's reading.
//
//   in:  socket --> [ rest of a chunk ] its place, without a copy
//               --> [ what follows    ] 4 KiB of heads and short payloads, looked at one by one
//
// Of one thread, but for send_now().
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

// What goes over a connection between two ranks once both have proven the job's secret: frames, each a head and its
// payload, in one order.

struct TcpFrameHead {
  uint32_t magic;
  uint32_t payload_bytes;
  uint64_t sequence;  // of this direction, from 0
  messages::Header header;
  uint32_t payload_sum;  // CRC32C, where the job has FSDP_NET_CHECKSUM=crc32c; else both are 0
  uint32_t head_sum;     // of all before
};
static_assert(sizeof(TcpFrameHead) == 24 + sizeof(messages::Header));
constexpr uint32_t frame_magic = 0x66736470;

// One on its way out. Data stays where it is; a short payload is kept here.
struct OutFrame {
  TcpFrameHead head;
  alignas(8) std::byte control[messages::longest_control];
  const std::byte *data = nullptr;  // NULL: the payload is in control
  uint64_t sent = 0;                // bytes of head and payload
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

// Gives the head the sums of what is there now. Once.
void seal(OutFrame &frame) noexcept;
uint32_t sum_of(const TcpFrameHead &head) noexcept;

// NULL: a peer that keeps to the protocol may send this; else what is wrong with it.
const char *find_misfit(const TcpFrameHead &head, uint32_t from, uint64_t sequence) noexcept;

// Takes what comes.
class Sink {
 public:
  // False: this peer sends more than it may.
  virtual bool control(const messages::Header &header, const std::byte *payload, uint64_t bytes) = 0;
  virtual messages::Place place(const messages::Header &header) = 0;
  virtual void arrived(const messages::Header &header) = 0;  // what had a place

 protected:
  ~Sink() = default;
};

struct LinkOptions {
  uint32_t peer = 0;  // rank of the job
  uint32_t rank = 0;  // this one
  bool checksum = false;
};

class Link {
 public:
  // tls: NULL, or what both ends have agreed on.
  Link(Fd socket, const LinkOptions &options, std::unique_ptr<Tls> tls = nullptr)
      : socket_(std::move(socket)), options_(options), tls_(std::move(tls)) {}
  ~Link();  // the connection ends, also where a child of this process has it
  Link(const Link &) = delete;
  Link &operator=(const Link &) = delete;

  const Fd &socket() const noexcept { return socket_; }
  bool open() const noexcept { return problem_.empty(); }
  // A call of write() came to what the socket does not take at the moment.
  bool full() const noexcept { return full_; }
  const std::string &problem() const noexcept { return problem_; }
  // errno; EPROTO: what came fits nothing; EBADMSG: it was changed on its way.
  int code() const noexcept { return code_; }

  // Takes these frames behind those that it has, and leaves the vector empty.
  void take(std::vector<OutFrame> &frames);
  bool writing() const noexcept { return (first_ < out_.size() || (tls_ && tls_->unsent())) && !cannot_write_; }
  // Sends what goes, up to a limit; the headers of the data that has gone are added to `sent`.
  void write(std::vector<messages::Header> &sent);
  // Before an end that this rank makes: what it said before any data that has not gone, if that goes at once.
  void send_last_words();
  // Reads what is there, up to a limit.
  void read(Sink &sink);
  // The chunk that has come in part, and has a place; NULL: none.
  const messages::Header *incomplete() const noexcept { return placed_ ? &header_ : nullptr; }
  // What has not gone.
  const std::vector<OutFrame> &unsent() noexcept;
  // Bytes that the peer's kernel has not acknowledged.
  bool acknowledged() const noexcept;

  // Called while no other thread writes, and not within TLS: sends as much of the frame as goes at once. What is wrong
  // is seen by write().
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
  size_t first_ = 0;  // of out_ that has not gone
  bool full_ = false;
  // The peer takes no more: what it said before that is still read, and only then is this the end.
  bool cannot_write_ = false;
  int write_code_ = 0;

  std::array<std::byte, 4096> staged_bytes_{};
  size_t staged_ = 0;
  uint64_t sequence_ = 0;
  messages::Header header_{};  // of the chunk that comes
  uint64_t left_ = 0;          // of it
  uint32_t sum_ = 0;           // of what has come of it
  uint32_t wanted_sum_ = 0;
  std::byte *to_ = nullptr;  // of what is left; NULL: dropped
  bool placed_ = false;
};

}  // namespace fsdp::transport::tcp
