// SPDX-License-Identifier: Apache-2.0
// What moves bytes between ranks. A communicator knows nothing of groups or strategies: it moves spans of shared
// arenas. Backends: shm/, ucx/, hybrid/, and for memory of a device staging/ and nccl/; which one is decided in
// factory.cpp alone.
//
//   Team          the ranks of one mesh axis: arenas, gates, and what they tell each other (exchange.h)
//   Arena         memory that every rank of the team can read, each rank writing its own part; of a device that is not
//                 the host, every rank has its own part alone
//   Gate          one monotone number a rank: arrive with a value, wait until all have it (versions, windows)
//   Communicator  one ordered sequence of collectives, each enqueued on a device stream; the engine has one for gathers
//                 and one for reduces, so that neither waits for the other
//
// Failure: every wait ends within the timeout, on the context's failure, and within 1 s of a peer's death, with an
// Error that names the rank. What a library thread finds fails the context; what a caller's thread finds is thrown, and
// fails the context too if the job is lost: one verdict (death, abort, mismatch, timeout, a rank whose context failed)
// decides for all ranks, first come, and every wait that does not complete reports that verdict's rank and text.
//
// Which thread is the caller's: the one that last enqueued, exchanged or created something in this world. Only a wait
// on that thread polls the interrupted hook.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/failure.h"
#include "comm/access.h"
#include "comm/exchange.h"
#include "comm/traits.h"
#include "device/device.h"

namespace fsdp::comm {

constexpr uint32_t most_ranks = 16384;  // of a job

class Arena {
 public:
  virtual ~Arena() = default;
  // The whole, readable: all ranks' parts.
  virtual const std::byte *data() const noexcept = 0;
  virtual uint64_t size_bytes() const noexcept = 0;
  // The same bytes, writable where make_writable said so. The same address for the arena's life.
  virtual std::byte *writable() const noexcept = 0;
  // Debug: take away or give back the right to read these pages of data() on this rank (whole pages inside the range).
  virtual void protect(uint64_t offset, uint64_t bytes, bool readable) = 0;
  // The same of writable(), inside of this rank's ranges.
  virtual void protect_own(uint64_t offset, uint64_t bytes, Access access) = 0;
  // Can it? Where it cannot, these are INTERNAL.
  virtual bool protects() const noexcept = 0;
};

struct Range {
  uint64_t offset;
  uint64_t bytes;
};

// Where rank r's piece is: arena offset + r * stride.
struct Source {
  const Arena *arena = nullptr;
  uint64_t offset = 0;
  uint64_t stride = 0;
};

// One all-gather of a launch: rank r's piece of `bytes` goes to to + r * bytes. A piece already in place is not copied.
struct GatherSpan {
  Source from;
  std::byte *to;
  uint64_t bytes;
};

// One reduce-scatter of a launch. from is each rank's FULL buffer of size() * shard_count elements; this rank sums its
// own slice [rank * shard_count, +shard_count) over all ranks in rank order (device::RankSum) into `to`.
struct ReduceSpan {
  Source from;
  fsdp_dtype dtype;
  fsdp_dtype wire_dtype;
  uint64_t shard_count;
  float *to;
  float factor;
  bool accumulate;
  // Of a device, all three for the communicator to work in, with size() * shard_count elements each. This rank's own
  // part of `from`, which is lost. Where wire_dtype is smaller than dtype: `wire`, of wire_dtype. Where the ranks of a
  // team that receives slices send fewer than 32 bits: `received`, of what they send; NULL: `from` has room for it, and
  // `to` is not there.
  std::byte *wire = nullptr;
  std::byte *received = nullptr;

  // What an addend travels in: rounding what travels and what is summed are the same.
  fsdp_dtype sent_dtype() const noexcept { return dtype_size(wire_dtype) < dtype_size(dtype) ? wire_dtype : dtype; }
};

// One all-reduce of a launch: reduce-scatter into `whole`'s own slice (accumulating there if asked), then all-gather of
// `whole`, which lies in an arena too (rank r's copy at whole.offset + r * whole.stride), so the bits equal those of
// the two.
struct AllReduceSpan {
  Source from;
  fsdp_dtype dtype;
  fsdp_dtype wire_dtype;
  uint64_t shard_count;
  Source whole;               // fp32, size() * shard_count elements
  std::byte *whole_writable;  // this rank's copy
  float factor;
  bool accumulate;
  std::byte *wire = nullptr, *received = nullptr;  // as in ReduceSpan
};

struct Fingerprint;  // comm/call/fingerprint.h

// What the caller says a collective is, compared between ranks: an operation number is added by the communicator.
struct Tag {
  uint32_t what = 0;      // the engine's number for the object, say a group index
  const char *name = "";  // for messages; copied by the call
  // For who makes one call of several collectives: that call, which messages name in their stead. Copied by the call
  // too.
  const Fingerprint *call = nullptr;
};

// A collective that was enqueued. released: every rank has read what it reads of this rank's sources.
struct Ticket {
  uint64_t phase = 0;  // 0: nothing was enqueued
};

class Gate {
 public:
  virtual ~Gate() = default;
  // Does it ever make anybody wait? One that does not is always reached.
  virtual bool holds_back() const noexcept = 0;
  // This rank has come to `value` (never less than before); everything it wrote before is visible to who waits for it.
  virtual void arrive(uint64_t value) = 0;
  // The same once the stream has done what was enqueued on it before. Peers know from now on that this rank's caller
  // has done its part.
  virtual void arrive(uint64_t value, device::Stream &stream) = 0;
  // Has every rank come to value? One acquire load a rank, no system call.
  virtual bool reached(uint64_t value) const noexcept = 0;
  // Block the calling thread until then (a caller's or a stream's; both poll what they must). An await that was
  // interrupted may be repeated.
  virtual void await(uint64_t value, const char *what) = 0;
};

// Its tasks must run in the order in which they were enqueued: one stream, or streams that events join. Every
// collective waits for all ranks, so that their calls can be compared; gather_stable does not and is compared with
// nothing.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // Sources must be stable on every rank from before the call until a later gate: nothing is synchronized, only copied.
  virtual void gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual Ticket all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual Ticket reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual Ticket all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual Ticket broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                           device::Stream &stream) = 0;
  virtual Ticket barrier(Tag tag, device::Stream &stream) = 0;
  // What follows on the stream starts when the ticket is released. On the caller's stream of the host device: blocks.
  virtual void await_release(Ticket ticket, device::Stream &stream) = 0;
  // True also for a round whose rest is skipped: what peers would still read of it is of no use.
  virtual bool released(Ticket ticket) const noexcept = 0;

  // -- the end of a step, and its failure --
  // quiesce: this rank enqueues nothing more in this round (FSDP_INTERNAL if it does). A peer that waits for more gets
  // MISMATCH naming this rank.
  virtual void quiesce() = 0;
  // abandon: collectives of this round that cannot complete are skipped, here and on peers (no failure of the context).
  virtual void abandon() = 0;
  // Did a collective of this round end by abandon, or by a mismatch? The error to report, if so.
  virtual std::optional<Error> broken() const = 0;
  // Start the next round. All ranks must have quiesced or abandoned, their streams be idle, and a gate been passed
  // since; another gate must be passed before the next collective. Sequence numbers agree again afterwards.
  virtual void next_round() = 0;
};

// One all-reduce of a launch, in place: the `count` values of every rank become their sum in rank order.
struct SumSpan {
  float *values;
  uint64_t count;
};

// One reduce-scatter of a launch: `values` has size() * count elements on every rank, and rank r's slice of them is
// [r * count, +count). The slices that all ranks have for this one are added in rank order: to = s0, += s1, ... or,
// to accumulate, to += s0, += s1, ... `to` may be this rank's own slice of `values`, then without accumulate.
struct SliceSumSpan {
  float *values;
  uint64_t count;
  float *to;
  bool accumulate;
};

// One all-gather of a launch, in place: rank r's `bytes` bytes lie at whole + r * bytes on every rank.
struct WholeSpan {
  std::byte *whole;
  uint64_t bytes;
};

// Collectives between ranks that need not share memory: each names addresses of its own. A collective has been done
// when its task on the stream has: this rank's buffers may then be written again. Order, rounds and failure as
// Communicator; every message carries the fingerprint of its call, and ranks that call different things get MISMATCH
// naming both. The sums of reduce_scatter and all_reduce are the same additions, so their bits are equal.
class MessageCommunicator {
 public:
  virtual ~MessageCommunicator() = default;
  virtual void all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual void reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual void all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) = 0;
  virtual void broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) = 0;
  virtual void barrier(Tag tag, device::Stream &stream) = 0;
  // Bytes that this rank has sent to others, for statistics.
  virtual uint64_t sent_bytes() const noexcept = 0;

  virtual void quiesce() = 0;
  virtual void abandon() = 0;
  virtual std::optional<Error> broken() const = 0;
  virtual void next_round() = 0;
};

// What each rank of a team of one host allocates for a MessageCommunicator.
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

// A team whose ranks are on several hosts has no arena, gate or Communicator: UNSUPPORTED.
class Team : public Exchange {
 public:
  virtual bool spans_hosts() const noexcept = 0;

  // Collective, on the caller's thread, in the same order on every rank. `what` is compared between ranks and shown in
  // messages. If a creation fails on one rank it throws that rank's error on all, and the team stays usable. A call
  // that was interrupted leaves the ranks at odds: later ones of this team are INVALID_STATE here.
  virtual std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable,
                                              const std::string &what) = 0;
  // `part_bytes` for every rank, each writing its own: rank r's part is at r * part_bytes. Of a device that is not the
  // host only this rank's part exists, and addresses of the others name nothing.
  virtual std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what);
  virtual std::unique_ptr<Gate> create_gate(const std::string &what) = 0;
  // Sums are in rank order; with a reduction block, so many neighbouring ranks are summed (and scaled) first, and the
  // blocks' sums added in order: to = b0, += b1, ... or, to accumulate, to += b0, += b1, ...
  virtual std::unique_ptr<Communicator> create_communicator(const std::string &what, uint32_t reduction_block = 0) = 0;
  // sums: will it be asked for sums? One that is not needs no memory for them.
  virtual std::unique_ptr<MessageCommunicator> create_message_communicator(const std::string &what,
                                                                           bool sums = true) = 0;
  // Throws if the job or this context failed, or if a look finds that a rank of the team died or stopped: then the job
  // fails with that verdict. waited: this rank has waited for them for a while, so one that has left has failed as
  // well. No wait for peers. For library threads that watch over work which they cannot wait for themselves.
  virtual void look(const std::string &what, bool waited);
  // Memory of the device that the communicators of this team will move bytes from and to, the n-th on one rank being
  // the n-th on all, with the same offsets used: they may make themselves ready for it. It outlives the team.
  // Collective.
  virtual void register_memory(std::byte *data, uint64_t bytes, const std::string &what);
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
  // Everything that the communicators of this rank have enqueued is given up, so that streams go on. Local, does not
  // wait: with several teams on one device, all are cut before any is renewed. Then renew: the communicators are as
  // new. Collective.
  virtual void cut() noexcept {}
  virtual void renew() {}
};

// The same ranks over memory of the device, as `team` has them over the host's: arenas hold this rank's part,
// communicators enqueue on the device's streams, and gates hold nobody back, since what ranks exchange are messages.
// Collective over the team. The host device: the team itself.
std::shared_ptr<Team> create_device_team(std::shared_ptr<Team> team, device::Device &device, DeviceTransport transport,
                                         const Waiter &waiter, Failure &failure);
// What each rank allocates (pinned, or of the device) for what the engine creates in such a team of so many ranks: a
// communicator for gathers and one for reduces. automatic: the most that it can be. NCCL's own buffers are not known.
uint64_t device_team_bytes(uint32_t ranks, DeviceTransport transport) noexcept;
// ... and for each MessageCommunicator of it, beside what World::message_bytes says of the host's.
uint64_t device_message_bytes(uint32_t ranks, DeviceTransport transport) noexcept;
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
  // What each rank of a team of these allocates for a MessageCommunicator.
  virtual uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const = 0;
  // Collective over the ranks named (which include this one, in the same order everywhere); a rank may be in several
  // teams. Waits for the team's first rank where ranks are processes, for nobody where they are threads.
  virtual std::unique_ptr<Team> create_team(std::span<const uint32_t> ranks, const std::string &what) = 0;
  // A few bytes that a rank shows to others while all go on with something else; what it showed before is replaced.
  // to: the rank of the job that reads them; nobody: all of them. One thread at a time; waits for nobody.
  static constexpr size_t post_bytes = 496;
  virtual void post(std::span<const std::byte> bytes, std::optional<uint32_t> to) noexcept = 0;
  // The last ones of a rank that have come here; false: there are none. Any thread.
  virtual bool read_post(uint32_t rank, std::span<std::byte> bytes) const noexcept = 0;
  // Throws if the job or this context has failed. Any thread.
  virtual void check() = 0;
  // Tell every rank of the job that this one failed: peers that wait get PEER_FAILED naming it. Any thread; no wait.
  virtual void abort(const std::string &reason) noexcept = 0;
  // This rank leaves in good order (after the closing barrier): later death of its process is not a failure.
  virtual void leave() noexcept = 0;
};

struct WorldOptions {
  uint32_t rank = 0;
  uint32_t size = 1;
  std::string rendezvous;  // where the ranks meet: a name (ranks of one host), tcp://host:port or file:///directory
  std::string secret;      // job secret, may be empty
  uint32_t timeout_ms = 300000;
  uint32_t attempt = 0;      // how often the launcher has started the job again; the ranks of two attempts never mix
  std::string job = {};      // what the launcher calls the job, may be empty
  std::string source = {};   // who said all this, for the log
  std::string host_id = {};  // for tests: this rank's host; empty: the one that it runs on
  uint32_t heartbeat_timeout_ms = 8000;  // a rank or node that is silent for so long is lost; at least 1000
  // Rank 0 of a job that failed tells it to ranks that still come in this time: else they look for it until a timeout.
  uint32_t farewell_ms = 400;
  std::function<void(fsdp_log_level, const std::string &)> log = {};  // on the caller's thread; may be empty
  // From any thread, as long as the world or a team of it lives; may be empty.
  std::function<void(fsdp_log_level, const std::string &)> log_later = {};
};

// The world as the launcher's variables say it: torchrun (and whoever sets RANK and WORLD_SIZE), else Open MPI, Slurm,
// MPICH; FSDP_RENDEZVOUS says where to meet instead of them. None set: a world of one. Throws INVALID_ARGUMENT naming
// what is missing or wrong.
WorldOptions read_launcher_environment();
// For rank and size that the caller gives: secret, attempt and, where it gives none, the rendezvous.
void complete_world(WorldOptions &options);
// FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE; empty if neither is set.
std::string read_job_secret();

// Ranks as processes.
std::unique_ptr<World> create_process_world(const WorldOptions &options, const Waiter &waiter, Failure &failure,
                                            device::Device &device);

// Ranks as threads: makes what `size` local worlds share; then one create_local_world each (any order, same thread is
// fine).
class LocalJob;
std::shared_ptr<LocalJob> create_local_job(uint32_t size);
std::unique_ptr<World> create_local_world(std::shared_ptr<LocalJob> job, uint32_t rank, const Waiter &waiter,
                                          Failure &failure, device::Device &device);

}  // namespace fsdp::comm
