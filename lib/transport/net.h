// SPDX-License-Identifier: Apache-2.0
// Messages between ranks of different hosts. Each rank has one Net, over TCP (tcp/) or UCX (ucx/).
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

// May be called from any thread; the user gets the line when a call of the context ends. May be empty.
using NetLog = std::function<void(fsdp_log_level, const std::string &)>;

// Net::address of each rank of a job. The addresses are packed, because every rank of a large job has all of them.
class NetAddresses {
 public:
  NetAddresses() = default;
  explicit NetAddresses(std::span<const std::vector<std::byte>> all) {
    for (const auto &address : all) add(address);
  }
  void reserve(size_t ranks) { ends_.reserve(ranks); }
  // Adds the next rank's address. Empty: no message is sent to that rank.
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

// The data that all ranks have after the rendezvous.
struct NetJob {
  NetAddresses addresses;
  Secret secret;     // the job's secret
  std::string name;  // differs between jobs with the same secret
  uint32_t heartbeat_timeout_ms = 8000;
  NetLog log = {};                    // must outlive the Net
  std::vector<std::byte> nonce = {};  // the job's nonce, which is random and not secret: for FSDP_NET_ENCRYPTION=on
};

class Net {
 public:
  virtual ~Net() = default;
  // The address at which peers reach this rank. The bootstrap passes the address on; a process that could change it
  // during the bootstrap could do any harm anyway.
  virtual std::vector<std::byte> address() const = 0;
  // Warnings about settings for the user, for the log; empty: none.
  virtual const std::string &warnings() const noexcept = 0;
  // Major version of the library that transfers the messages, because ranks with different versions may be
  // incompatible. 0: no other library is used.
  virtual uint32_t library_major() const noexcept { return 0; }
  // Must be called once, before the functions below. A message that arrives earlier is kept. The device allocates the
  // memory for sums.
  virtual void join(NetJob job, std::shared_ptr<Seat> seat, device::Device &device) = 0;
  // Collectives among `ranks`: ranks of the job, including this rank, in the same order on all of them. `key` is the
  // same on all of them, and this Net uses it only here. Does not wait. The collectives must end before the Net.
  virtual std::unique_ptr<Collectives> create_collectives(std::vector<uint32_t> ranks, uint64_t key,
                                                          const std::string &what, bool sums = true) = 0;
  // Runs on the caller's thread: rank r's `bytes` bytes go to the address all + r * bytes. `key` is as for
  // create_collectives(); `what` and `bytes` are compared. After an exchange that did not complete, further exchanges
  // with this key throw INVALID_STATE.
  virtual void exchange(std::span<const uint32_t> ranks, uint64_t key, const void *mine, uint64_t bytes, void *all,
                        const char *what) = 0;
  // Like exchange(), but copies the first rank's `bytes` bytes at `data` to `data` of the others.
  virtual void broadcast(std::span<const uint32_t> ranks, uint64_t key, void *data, uint64_t bytes,
                         const char *what) = 0;
  // The bytes that create_collectives allocates for sums of this many ranks; without sums it allocates nothing.
  virtual uint64_t scratch_bytes(uint32_t ranks) const noexcept = 0;
};

// The value of FSDP_NET: auto (also if it is not set), tcp or ucx. Throws INVALID_ARGUMENT.
enum class NetChoice : uint32_t { automatic, tcp, ucx };
NetChoice read_net_choice();

// How messages over TCP are protected in transit: FSDP_NET_CHECKSUM (none, crc32c) and FSDP_NET_ENCRYPTION (off, on).
struct NetProtection {
  bool checksum = false, encryption = false;
  bool any() const noexcept { return checksum || encryption; }
};
// Throws INVALID_ARGUMENT.
NetProtection read_net_protection();

// Listens at this numeric address, or at that of FSDP_NET_INTERFACE. A process that connects must prove the job's
// secret before anything else is read. Throws UNSUPPORTED if the user asks for encryption and there is no libssl.
std::unique_ptr<Net> create_tcp_net(uint32_t rank, const std::string &address, NetProtection protection = {});
// Throws UNSUPPORTED if the library was built without UCX or UCX is not installed; the message says which. With
// `guarded` (FSDP_NET=auto) only hardware that guards memory with keys is used; throws UNSUPPORTED if there is none.
std::unique_ptr<Net> create_ucx_net(uint32_t rank, bool guarded);
// The memory needs of a Net's messages, known without a Net. net_window is the number of chunks that a peer may be
// ahead, so that some are summed while the next ones are sent. read_net_chunk_bytes reads FSDP_NET_CHUNK_BYTES.
// net_chunk_bytes is the part of that size that is used with this many ranks.
uint64_t net_window(uint32_t ranks, uint64_t chunk_bytes) noexcept;
uint64_t read_net_chunk_bytes();
uint64_t net_chunk_bytes(uint32_t ranks, uint64_t largest) noexcept;
uint64_t net_scratch_bytes(uint32_t ranks, uint64_t largest) noexcept;
// The largest number of bytes that a rank gives to a short call (message/channel/short_calls.h) of a communicator that
// sums.
uint64_t net_short_bytes(uint32_t ranks) noexcept;
// The size of a box for the message of a short call, and of all boxes, two for each rank.
uint64_t net_box_bytes(uint64_t short_bytes) noexcept;
uint64_t net_boxes_bytes(uint32_t ranks, uint64_t short_bytes) noexcept;

// For tests and measurements: a rank whose job is not watched, so that it learns of other ranks only by messages.
std::shared_ptr<Seat> create_lone_seat(uint32_t rank, uint32_t size, const Waiter &waiter, Failure &failure);
// "yes (needs 1.13 headers)" or "no".
const char *net_description() noexcept;

// The descriptors that a rank of a job over several hosts needs, in addition to those that are open at the rendezvous.
// They are counted in advance, because an error for lack of descriptors would not tell the reason.

// The limit of this process (RLIMIT_NOFILE), and how many descriptors are open.
struct Descriptors {
  uint32_t limit = 0, open = 0;
};
Descriptors count_descriptors();

struct DescriptorNeed {
  uint32_t control = 0;   // for a rank that leads its host: connections to its neighbours in the tree of leaders, and
                          // those that it needs if a neighbour is lost
  uint32_t messages = 0;  // one for each rank of another host with which it exchanges messages
  uint64_t all() const noexcept;
};
// Spare descriptors: for connections that are not authenticated yet, memory that ranks of a host share, and files.
constexpr uint32_t spare_descriptors = 96;
// Returns "it needs 300 more descriptors (...), but ...: raise ...", or an empty text if there are enough.
std::string find_shortage(const Descriptors &has, const DescriptorNeed &need);

}  // namespace fsdp::transport
