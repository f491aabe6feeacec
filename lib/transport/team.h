// SPDX-License-Identifier: Apache-2.0
// The ranks of a job, and the ranks of one mesh axis:
//
//   World   a rank's membership in the job, made by the bootstrap: creates teams
//   Team    the ranks of one axis: their memory, its versions, their collectives and their small exchanges
//
// collectives.h describes collectives; exchange.h describes small exchanges, and when the memory of other ranks may be
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checked.h"
#include "base/failure.h"
#include "device/device.h"
#include "membership/job.h"
#include "transport/collectives.h"
#include "transport/exchange.h"
#include "transport/names.h"

namespace fsdp::transport {

// Keys for teams, which all ranks of a team compute without communication. The n-th team of the same ranks has the same
// key on each of them, and no other team has that key.

class TeamKeys {
 public:
  uint64_t next(const std::vector<uint32_t> &ranks) {
    uint64_t key = 0xcbf29ce484222325;
    for (const uint32_t rank : ranks) key = mix(key, rank + 1);
    return mix(key, ++made_[ranks]);
  }
  // Returns the key of the n-th object of a team.
  static uint64_t mix(uint64_t key, uint64_t n) { return (key ^ n) * 0x100000001b3; }  // FNV-1a

 private:
  std::map<std::vector<uint32_t>, uint64_t> made_;
};

}  // namespace fsdp::transport

namespace fsdp::membership {
class LocalJob;
}

namespace fsdp::transport {

struct Range {
  uint64_t offset;
  uint64_t bytes;
};

// The bytes that each rank of a team on one host allocates for collectives without arenas.
uint64_t message_staging_bytes(uint32_t ranks) noexcept;

// A line for the context's log.
struct Note {
  fsdp_log_level level;
  std::string text;
};

// How ranks exchange data in memory of a device that is not the host.
enum class DeviceTransport {
  none,       // the memory is the host's, and ranks read it in place
  automatic,  // nccl if it can serve these ranks, else staging
  nccl,
  staging  // through pinned memory of the host; the rest as for memory of the host
};
// A team whose ranks are on several hosts has no arenas and no collectives over arenas: these throw UNSUPPORTED.
class Team : public Exchange {
 public:
  virtual bool spans_hosts() const noexcept = 0;

  // Creations are collective, on the caller's thread, in the same order on every rank. `what` is compared between ranks
  // and shown in messages. If a creation fails on one rank, that rank's error is thrown on all, and the team stays
  // usable. After an interrupted call the ranks no longer agree on their calls, so later calls of this team throw
  // INVALID_STATE on this rank.
  virtual std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                              View view = View::read_only) = 0;
  // Creates an arena with `part_bytes` for every rank, of which each rank writes its own part: rank r's part is at r *
  // part_bytes. On a device that is not the host only this rank's part exists, and the addresses of the others are not
  // valid.
  virtual std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what,
                                              View view = View::read_only) {
    const Range own{rank() * part_bytes, part_bytes};
    return create_arena(checked_multiply(part_bytes, size(), what.c_str()), {&own, 1}, what, view);
  }
  // Creates the versions of memory that the ranks pull from each other. Returns NULL if gathers wait for all ranks,
  // because a rank that has received a part need not ask whether it was written.
  virtual std::unique_ptr<Versions> create_versions(const std::string &) { return nullptr; }
  // Creates one sequence of collectives, which waits for no other sequence.
  virtual std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape = {}) = 0;
  // Throws if the job or this context has failed. Also throws, and fails the job, if a check finds that a rank of the
  // team has died or stopped. If the bool is true, this rank has waited for the others for a while, and a rank that has
  // left counts as failed, too. Does not wait for peers. For library threads that watch work for which they cannot
  // wait.
  virtual void look(const std::string &, bool) {}
  // Announces memory of the device from which and to which the collectives of this team will move bytes. The n-th
  // memory on one rank corresponds to the n-th on all ranks, and the same offsets are used. The memory must outlive the
  // team. Collective.
  virtual void register_memory(std::byte *, uint64_t, const std::string &) {}
  virtual const CollectiveTraits &traits() const noexcept = 0;
  // Describes the choices made at creation, and their reasons.
  virtual std::vector<Note> notes() const { return {}; }
  // The chosen transport for memory of a device.
  virtual DeviceTransport transport() const noexcept { return DeviceTransport::none; }
  // Returns the news since creation, each only once. Called on the caller's thread.
  virtual std::vector<Note> take_news() { return {}; }

  // -- for teams whose enqueued work cannot be taken back and may wait for peers forever --
  // Called after all ranks have abandoned a round: have all ranks enqueued the same work, so that all of it ends?
  // Collective; waits for no stream.
  virtual bool ends_alike() { return true; }
  // cut() gives up everything that this rank's collectives have enqueued, so that streams go on. It is not collective
  // and does not wait; if there are several teams on one device, all are cut before any is renewed. renew() then
  // restores the collectives, so that they can be used again. It is collective.
  virtual void cut() noexcept {}
  virtual void renew() {}
};

// Returns a team of the same ranks over memory of the device; `team` is over memory of the host. Arenas have only this
// rank's part, collectives are enqueued on the device's streams, and no rank waits for versions, because ranks exchange
// messages. Collective over the team. For the host device it returns `team` itself.
std::shared_ptr<Team> create_device_team(std::shared_ptr<Team> team, device::Device &device, DeviceTransport transport,
                                         const Waiter &waiter, Failure &failure);
// Between hosts NCCL would open sockets that the job's secret does not protect. So both a team between hosts that asks
// for NCCL and its plan are refused with UNSUPPORTED. Messages go through the host's memory to TCP or UCX.
[[noreturn]] void refuse_nccl_between_hosts(size_t ranks, uint32_t first, uint32_t last);
// The bytes that each rank allocates (pinned, or on the device) in such a team of `ranks` ranks. They are for the
// collectives that the engine creates: some for gathers and others for reduces. For `automatic` it is the maximum.
// NCCL's own buffers are not included, because their size is unknown. `longest_call` is that of Shape.
uint64_t device_team_bytes(uint32_t ranks, DeviceTransport transport, uint64_t longest_call) noexcept;
// The bytes for each sequence of collectives without arenas, in addition to World::message_bytes for the host's
// collectives.
uint64_t device_message_bytes(uint32_t ranks, DeviceTransport transport, uint64_t longest_call) noexcept;
// The traits of teams with this transport, known before there are any teams.
const CollectiveTraits &traits_of(DeviceTransport transport) noexcept;

// A rank's membership in the job. The bootstrap makes it, and it creates teams.
class World {
 public:
  virtual ~World() = default;
  virtual uint32_t rank() const noexcept = 0;
  virtual uint32_t size() const noexcept = 0;
  virtual const std::string &description() const noexcept = 0;  // how the ranks met, for the log
  virtual std::string warnings() const { return {}; }           // warnings for the user; empty: none
  virtual uint32_t host_of(uint32_t rank) const = 0;            // the number of the rank's host, from 0
  virtual bool has_own_cores() const noexcept = 0;              // the ranks of this host have at least one core each
  virtual bool has_spare_cores() const noexcept = 0;            // the ranks of this host have at least two cores each
  // The bytes that each rank of a team of these ranks allocates for collectives without arenas.
  virtual uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const = 0;
  // Collective over the given ranks, which include this rank and are in the same order everywhere. A rank may be in
  // several teams. Waits for the team's first rank if ranks are processes, and not at all if they are threads.
  virtual std::unique_ptr<Team> create_team(std::span<const uint32_t> ranks, const std::string &what) = 0;
  // Shows a few bytes to other ranks while all ranks go on with their work. They replace the bytes of this rank's last
  // post. `to` is the rank of the job that reads them; empty: all ranks. Posts from other hosts reach the host of rank
  // 0, and posts from rank 0 reach all hosts. Few texts are kept at the same time, those of the lowest ranks; other
  // texts are lost. May be called by one thread at a time; does not wait.
  virtual void post(std::span<const std::byte> bytes, std::string_view text, std::optional<uint32_t> to) noexcept = 0;
  // Reads the last post of a rank that has reached this host, and its terminated text. Returns false if there is no
  // post. May be called by any thread.
  virtual bool read_post(uint32_t rank, std::span<std::byte> bytes, std::span<char> text) const noexcept = 0;
  // Throws if the job or this context has failed, unless the only failure is that another rank destroyed its context.
  // May be called by any thread.
  virtual void check() = 0;
  // Tells every rank of the job that this rank failed: peers that wait get PEER_FAILED, which names it. May be called
  // by any thread, and does not wait.
  virtual void abort(const std::string &reason) noexcept = 0;
  // Tells every rank that this rank has destroyed its context without closing it: peers that wait get PEER_FAILED, too.
  // May be called by any thread, and does not wait.
  virtual void tell_destroyed(const std::string &reason) noexcept = 0;
  // Called after the closing barrier: this rank leaves in good order, and a later death of its process is not a
  // failure.
  virtual void leave() noexcept = 0;
};

// The world of ranks that are processes.
std::unique_ptr<World> create_process_world(const WorldOptions &options, const Waiter &waiter, Failure &failure,
                                            device::Device &device);

// For ranks that are threads: makes the state that `size` local worlds share. Then create_local_world() must be called
// once for each rank, in any order; all calls may come from the same thread.
std::shared_ptr<LocalJob> create_local_job(uint32_t size);
std::unique_ptr<World> create_local_world(std::shared_ptr<LocalJob> job, uint32_t rank, const Waiter &waiter,
                                          Failure &failure, device::Device &device);

}  // namespace fsdp::transport

namespace fsdp::transport {

// Describes this build's use of NCCL to users: "no", or the oldest version that it opens.
const char *nccl_description() noexcept;

// The ranks of a host team over memory of their devices: the part that all such teams share, for any transport. The
// host team still does small exchanges and checks liveness.

// The arena of a device whose memory other ranks do not read. Only this rank's part exists; the addresses of the other
// parts are not valid.

class PartArena : public Arena {
 public:
  PartArena(device::Device &device, uint64_t part_bytes, uint32_t rank, uint32_t size, std::string what);

  const std::byte *data() const noexcept override { return base_; }
  uint64_t size_bytes() const noexcept override { return size_bytes_; }
  std::byte *writable() const noexcept override { return base_; }
  void protect(uint64_t offset, uint64_t bytes, bool readable) override;
  void protect_own(uint64_t offset, uint64_t bytes, Access access) override;
  bool protects() const noexcept override { return false; }
  void restore(uint64_t offset, uint64_t bytes) override;
  // The memory of this rank's part.
  device::Memory &own() const noexcept { return *memory_; }

 private:
  std::string what_;
  uint64_t size_bytes_;
  std::unique_ptr<device::Memory> memory_;
  // The address that rank 0's part would have if the parts of all ranks were adjacent. So code that computes base +
  // rank * part_bytes needs no special case for a device. Only this rank's own part is ever accessed.
  std::byte *base_;
};

// Work in a stream of a device waits for peers inside the stream, and cannot be queried or skipped.
inline constexpr CollectiveTraits device_traits{.gathers_are_collective = true,
                                                .records_calls = true,
                                                .step_ends_round = false,
                                                .releases_tickets = false,
                                                .rounds_gradients_before_sending = true,
                                                .receives_slices = false};

class DeviceTeam : public Team {
 public:
  DeviceTeam(std::shared_ptr<Team> host, device::Device &device) : host_(std::move(host)), device_(device) {}

  const CollectiveTraits &traits() const noexcept override { return device_traits; }
  bool spans_hosts() const noexcept override { return host_->spans_hosts(); }
  uint32_t rank() const noexcept override { return host_->rank(); }
  uint32_t size() const noexcept override { return host_->size(); }
  uint32_t world_rank(uint32_t r) const noexcept override { return host_->world_rank(r); }

  // Only for a team of one rank, because no other rank could read the arena.
  std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                      View view) override;
  std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what, View view) override;
  Ballot fold(const Ballot &mine, const char *what) override { return host_->fold(mine, what); }
  void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) override {
    host_->all_gather(mine, bytes, all, what);
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) override {
    return host_->all_gather(mine, what);
  }
  uint64_t meetings() const noexcept override { return host_->meetings(); }
  void look(const std::string &what, bool waited) override { host_->look(what, waited); }
  std::vector<Note> notes() const override { return notes_; }
  void add_note(Note note) { notes_.push_back(std::move(note)); }
  DeviceTransport transport() const noexcept override { return transport_; }
  void set_transport(DeviceTransport transport) noexcept { transport_ = transport; }

 protected:
  std::shared_ptr<Team> host_;
  device::Device &device_;

 private:
  std::vector<Note> notes_;
  DeviceTransport transport_ = DeviceTransport::staging;
};

}  // namespace fsdp::transport
