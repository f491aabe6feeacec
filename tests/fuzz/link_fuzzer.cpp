// SPDX-License-Identifier: Apache-2.0
// Sends frames between hosts, as a peer could send them. Each input holds the bytes that arrive over one connection, in
// several reads. Bytes are written only into the places that a receiver has named, and only bytes that were sent
// arrive. The end that closes the connection says why.
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <vector>

#include "transport/message/tcp/link.h"

namespace {

using fsdp::Fd;
using fsdp::transport::messages::Header;
using fsdp::transport::messages::Place;

constexpr uint64_t longest_chunk = 100'000;

void require(bool well) {
  if (!well) std::abort();
}

// Stands in for a channel. A chunk with an odd number has no place, and one that is too long fits nowhere.
class Places final : public fsdp::transport::tcp::Sink {
 public:
  bool control(const Header &, const std::byte *payload, uint64_t bytes) override {
    require(bytes <= fsdp::transport::messages::longest_control);
    for (uint64_t i = 0; i < bytes; ++i) sum_ += static_cast<unsigned>(payload[i]);  // all of it can be read
    return true;
  }
  Place place(const Header &header) override {
    require(!waits_);
    if (header.bytes > longest_chunk) return {nullptr, true};
    if (header.chunk % 2) return {};
    chunk_.assign(header.bytes, std::byte{0});  // exactly this long, so that the sanitizer sees accesses behind the end
    waits_ = true;
    return {chunk_.empty() ? &none_ : chunk_.data()};
  }
  void arrived(const Header &header) override {
    require(waits_ && header.bytes == chunk_.size());
    waits_ = false;
  }

 private:
  std::vector<std::byte> chunk_;
  std::byte none_{};
  bool waits_ = false;
  unsigned sum_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 1) return 0;
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  const Fd near(ends[0]);
  const bool checksum = data[0] & 0x80;  // the first byte chooses this, and where the other bytes are split
  fsdp::transport::tcp::Link link(Fd(ends[1]), {3, 0, checksum});
  Places places;
  const size_t piece = size_t{1} + (data[0] & 0x7f) * 8;
  for (size_t at = 1; at < size && link.open(); at += piece) {
    const size_t count = std::min(piece, size - at);
    require(::send(near.get(), data + at, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count));
    for (int i = 0; i < 8; ++i) link.read(places);
  }
  require(link.open() || !link.problem().empty());
  return 0;
}
