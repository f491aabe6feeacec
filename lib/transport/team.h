// SPDX-License-Identifier: Apache-2.0
// The ranks of a job, and those of one mesh axis:
//
//   World   a rank's membership in the job, made by bootstrap: gives teams
//   Team    the ranks of one axis: their memory, its versions, their collectives, and what they tell each other
//
// What collectives are: collectives.h; when memory of others may be read: versions.h; what ranks tell each other in few
// bytes: exchange.h.
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

// Numbers for teams, which all ranks of a team come to without a word: the n-th team of the same ranks has the same key
// on each of them, and no other team has it.

class TeamKeys {
 public:
  uint64_t next(const std::vector<uint32_t> &ranks) {
    uint64_t key = 0xcbf29ce484222325;
    for (const uint32_t rank : ranks) key = mix(key, rank + 1);
    return mix(key, ++made_[ranks]);
  }
  // The n-th thing of a team.
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

// What each rank of a team of one host allocates for collectives without arenas.
uint64_t message_staging_bytes(uint32_t ranks) noexcept;  // ... where they share a host

// A line for the context's log.
struct Note {
  fsdp_log_level level;
  std::string text;
};

// How ranks exchange what lies in memory of a device that is not the host's.
enum class DeviceTransport {
  none,       // it is the host's, where ranks read it
  automatic,  // nccl where it can serve these ranks, else staging
  nccl,
  staging  // through pinned memory of the host, and from there as between ranks of the host
};

// A team whose ranks are on several hosts has no arena and no collectives over arenas: UNSUPPORTED.
class Team : public Exchange {
 public:
  virtual bool spans_hosts() const noexcept = 0;

  // Collective, on the caller's thread, in the same order on every rank. `what` is compared between ranks and shown in
  // messages. If a creation fails on one rank it throws that rank's error on all, and the team stays usable. A call
  // that was interrupted leaves the ranks at odds: later ones of this team are INVALID_STATE here.
  virtual std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                              View view = View::read_only) = 0;
  // `part_bytes` for every rank, each writing its own: rank r's part is at r * part_bytes. Of a device that is not the
  // host only this rank's part exists, and addresses of the others name nothing.
  virtual std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what,
                                              View view = View::read_only) {
    const Range own{rank() * part_bytes, part_bytes};
    return create_arena(checked_multiply(part_bytes, size(), what.c_str()), {&own, 1}, what, view);
  }
  // Of what its ranks pull from each other. NULL where gathers meet: a rank that has received a part need not ask
  // whether it was written.
  virtual std::unique_ptr<Versions> create_versions(const std::string &) { return nullptr; }
  // One sequence of them, which waits for no other one.
  virtual std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape = {}) = 0;
  // Throws if the job or this context failed, or if a look finds that a rank of the team died or stopped: then the job
  // fails with that verdict. waited: this rank has waited for them for a while, so one that has left has failed as
  // well. No wait for peers. For library threads that watch over work which they cannot wait for themselves.
  virtual void look(const std::string &, bool) {}
  // Memory of the device that the collectives of this team will move bytes from and to, the n-th on one rank being the
  // n-th on all, with the same offsets used. They may make themselves ready for it. It outlives the team. Collective.
  virtual void register_memory(std::byte *, uint64_t, const std::string &) {}
  virtual const CollectiveTraits &traits() const noexcept = 0;
  // What was chosen at creation, and why.
  virtual std::vector<Note> notes() const { return {}; }
  // ... of how memory of a device travels.
  virtual DeviceTransport transport() const noexcept { return DeviceTransport::none; }
  // What has come up since, each told once. The caller's thread.
  virtual std::vector<Note> take_news() { return {}; }

  // -- after all ranks have abandoned a round, where what was enqueued cannot be taken back: it may wait for peers for
  // ever -- Have all ranks enqueued the same, so that all of it ends? Collective; waits for no stream.
  virtual bool ends_alike() { return true; }
  // Everything that the collectives of this rank have enqueued is given up, so that streams go on. Local, does not
  // wait: with several teams on one device, all are cut before any is renewed. Then renew: they are as
  // new. Collective.
  virtual void cut() noexcept {}
  virtual void renew() {}
};

// The same ranks over memory of the device, as `team` has them over the host's. Arenas hold this rank's part,
// collectives are enqueued on the device's streams, and no rank waits for versions, since what ranks exchange are
// messages. Collective over the team. The host device: the team itself.
std::shared_ptr<Team> create_device_team(std::shared_ptr<Team> team, device::Device &device, DeviceTransport transport,
                                         const Waiter &waiter, Failure &failure);
// Between hosts NCCL would open sockets that the job's secret does not guard: a team there that asks for it is refused,
// with UNSUPPORTED, and so is its plan. Messages go through the host's memory to TCP or UCX.
[[noreturn]] void refuse_nccl_between_hosts(size_t ranks, uint32_t first, uint32_t last);
// What each rank allocates (pinned, or of the device) for what the engine creates in such a team of so many ranks:
// collectives for gathers and others for reduces. automatic: the most that it can be. NCCL's own buffers are not known.
// longest_call: as in Shape.
uint64_t device_team_bytes(uint32_t ranks, DeviceTransport transport, uint64_t longest_call) noexcept;
// ... and for each one without arenas, beside what World::message_bytes says of the host's.
uint64_t device_message_bytes(uint32_t ranks, DeviceTransport transport, uint64_t longest_call) noexcept;
// Of its teams, before there are any.
const CollectiveTraits &traits_of(DeviceTransport transport) noexcept;

// A rank's membership in the job: made by bootstrap, gives teams.
class World {
 public:
  virtual ~World() = default;
  virtual uint32_t rank() const noexcept = 0;
  virtual uint32_t size() const noexcept = 0;
  virtual const std::string &description() const noexcept = 0;  // how the ranks met, for the log
  virtual std::string warnings() const { return {}; }           // ... and what the user should know; empty: nothing
  virtual uint32_t host_of(uint32_t rank) const = 0;            // a number, from 0
  // Have the ranks of this host at least two cores each?
  virtual bool has_spare_cores() const noexcept = 0;
  // What each rank of a team of these allocates for collectives without arenas.
  virtual uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const = 0;
  // Collective over the ranks named (which include this one, in the same order everywhere); a rank may be in several
  // teams. Waits for the team's first rank where ranks are processes, and not at all where they are threads.
  virtual std::unique_ptr<Team> create_team(std::span<const uint32_t> ranks, const std::string &what) = 0;
  // A few bytes that a rank shows to others while all go on with something else; what it showed before is replaced.
  // to: the rank of the job that reads them; empty: all of them. From other hosts it comes to rank 0's, and from rank
  // 0 to all. Of texts there are few at a time, those of the lowest ranks: others are lost. One thread at a time; does
  // not wait.
  virtual void post(std::span<const std::byte> bytes, std::string_view text, std::optional<uint32_t> to) noexcept = 0;
  // The last ones of a rank that have come here, and their text, with an end; false: there are none. Any thread.
  virtual bool read_post(uint32_t rank, std::span<std::byte> bytes, std::span<char> text) const noexcept = 0;
  // Throws if the job or this context has failed, unless all that failed is that another rank destroyed its context.
  // Any thread.
  virtual void check() = 0;
  // Tell every rank of the job that this one failed: peers that wait get PEER_FAILED naming it. Any thread; no wait.
  virtual void abort(const std::string &reason) noexcept = 0;
  // ... that this one has destroyed its context without closing it: peers that wait get the same. Any thread; no wait.
  virtual void tell_destroyed(const std::string &reason) noexcept = 0;
  // This rank leaves in good order (after the closing barrier): later death of its process is not a failure.
  virtual void leave() noexcept = 0;
};

// Ranks as processes.
std::unique_ptr<World> create_process_world(const WorldOptions &options, const Waiter &waiter, Failure &failure,
                                            device::Device &device);

// Ranks as threads: makes what `size` local worlds share; then one create_local_world each (any order, same thread is
// fine).
std::shared_ptr<LocalJob> create_local_job(uint32_t size);
std::unique_ptr<World> create_local_world(std::shared_ptr<LocalJob> job, uint32_t rank, const Waiter &waiter,
                                          Failure &failure, device::Device &device);

}  // namespace fsdp::transport

namespace fsdp::transport {

// What this build has of NCCL, for people: "no", or from which version it is opened.
const char *nccl_description() noexcept;

}  // namespace fsdp::transport
