// SPDX-License-Identifier: Apache-2.0
// Messages between ranks of different hosts. One Net per rank, over TCP (tcp/) or UCX (ucx/).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "membership/wire/secret.h"
#include "transport/names.h"
#include "transport/team.h"

namespace fsdp::membership {
struct Seat;
}

namespace fsdp::transport {

// From any thread; the line reaches the user when a call of the context ends. May be empty.
using NetLog = std::function<void(fsdp_log_level, const std::string &)>;

// Net::address of each rank of a job, packed: every rank of a large one has them all.
class NetAddresses {
 public:
  NetAddresses() = default;
  explicit NetAddresses(std::span<const std::vector<std::byte>> all) {
    for (const auto &address : all) add(address);
  }
  void reserve(size_t ranks) { ends_.reserve(ranks); }
  // The next rank's. Empty: that one is not sent to.
  void add(std::span<const std::byte> address) {
    bytes_.insert(bytes_.end(), address.begin(), address.end());
    ends_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
  uint32_t size() const noexcept { return static_cast<uint32_t>(ends_.size()); }
  std::span<const std::byte> operator[](uint32_t rank) const noexcept {
    const size_t begin = rank ? ends_[rank - 1] : 0;
    return std::span(bytes_).subspan(begin, ends_[rank] - begin);
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<uint32_t> ends_;
};

// What all ranks know once they have met.
struct NetJob {
  NetAddresses addresses;
  Secret secret;     // of the job
  std::string name;  // differs between jobs of one secret
  uint32_t heartbeat_timeout_ms = 8000;
  NetLog log = {};                    // outlives the Net
  std::vector<std::byte> nonce = {};  // of the job, random and no secret: for FSDP_NET_ENCRYPTION=on
};

class Net {
 public:
  virtual ~Net() = default;
  // How peers reach this rank. It travels in the bootstrap; a process that could change it there could do anything
  // here.
  virtual std::vector<std::byte> address() const = 0;
  // What the user should know of its settings, for the log; empty: nothing.
  virtual const std::string &warnings() const noexcept = 0;
  // Of the library that carries its messages: what ranks of different ones say they need not understand. 0: none but
  // this one.
  virtual uint32_t library_major() const noexcept { return 0; }
  // Before all below, once. A message that comes earlier is kept. The device allocates what sums need.
  virtual void join(NetJob job, std::shared_ptr<Seat> seat, device::Device &device) = 0;
  // Collectives among `ranks` (of the job, in the same order everywhere, this one among them). key: the same on all of
  // them, and of nothing else that this Net is used for. Does not wait. They end before the Net.
  virtual std::unique_ptr<Collectives> create_collectives(std::vector<uint32_t> ranks, uint64_t key,
                                                          const std::string &what, bool sums = true) = 0;
  // On the caller's thread: every rank's `bytes` bytes go to all + r * bytes. key as above. `what` and `bytes` are
  // compared. After an exchange that did not complete those of this key are INVALID_STATE.
  virtual void exchange(std::span<const uint32_t> ranks, uint64_t key, const void *mine, uint64_t bytes, void *all,
                        const char *what) = 0;
  // ... the first rank's `bytes` bytes at data go to that of the others.
  virtual void broadcast(std::span<const uint32_t> ranks, uint64_t key, void *data, uint64_t bytes,
                         const char *what) = 0;
  // What create_collectives allocates for sums of this many ranks; without sums nothing.
  virtual uint64_t scratch_bytes(uint32_t ranks) const noexcept = 0;
};

// What FSDP_NET says: auto (or nothing), tcp, ucx. Throws INVALID_ARGUMENT.
enum class NetChoice : uint32_t { automatic, tcp, ucx };
NetChoice read_net_choice();

// What guards the bytes of messages over TCP on their way: FSDP_NET_CHECKSUM (none, crc32c), FSDP_NET_ENCRYPTION (off,
// on).
struct NetProtection {
  bool checksum = false, encryption = false;
  bool any() const noexcept { return checksum || encryption; }
};
// Throws INVALID_ARGUMENT.
NetProtection read_net_protection();

// Listens at this numeric address, or at that of FSDP_NET_INTERFACE. A process that connects proves the job's secret
// before anything else is read. UNSUPPORTED where it is to encrypt and there is no libssl.
std::unique_ptr<Net> create_tcp_net(uint32_t rank, const std::string &address, NetProtection protection = {});
// UNSUPPORTED where the library was built without UCX, or where UCX is not installed: the message says which.
// guarded: only by hardware that guards memory with keys (FSDP_NET=auto); UNSUPPORTED where there is none.
std::unique_ptr<Net> create_ucx_net(uint32_t rank, bool guarded);
// What a Net's messages need, also where there is none yet. Chunks that a peer may be ahead, so that some are summed
// while the next ones travel; FSDP_NET_CHUNK_BYTES; what is left of it, and needed for sums, with so many ranks.
uint64_t net_window(uint32_t ranks, uint64_t chunk_bytes) noexcept;
uint64_t read_net_chunk_bytes();
uint64_t net_chunk_bytes(uint32_t ranks, uint64_t largest) noexcept;
uint64_t net_scratch_bytes(uint32_t ranks, uint64_t largest) noexcept;

// For tests and measurements: a rank whose job is not watched, so that it hears of others by messages alone.
std::shared_ptr<Seat> create_lone_seat(uint32_t rank, uint32_t size, const Waiter &waiter, Failure &failure);
// "yes (needs 1.13 headers)" or "no".
const char *net_description() noexcept;

}  // namespace fsdp::transport
