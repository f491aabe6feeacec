// SPDX-License-Identifier: Apache-2.0
// Communicators, and where their ranks meet.
#pragma once

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "simulated_nccl/simulated_nccl.h"
#include "transport/nccl/library.h"

namespace simulated::nccl {

using namespace fsdp::transport::nccl;  // its C types are the interface

enum class Kind { all_gather, reduce_scatter, all_reduce, broadcast, send, receive };

// One collective, as one rank calls it; or a message to or from one peer.
struct Collective {
  Kind kind;
  const std::byte *from;
  std::byte *to;
  size_t count;
  DataType type;
  Operation operation;
  int root;                // of messages: the peer
  uint32_t readers = ~0u;  // GPUs that may access what is read here, by bit
};

// The ranks of a communicator, and the n-th launch of each.
struct Meeting {
  // By rank. A rank that is aborted when all have come ends, and its kernel with it, while others look at what it
  // launched.
  std::vector<std::shared_ptr<const std::vector<Collective>>> launches;
  size_t came = 0, read = 0;
};

// A message from one rank to another, as each of the two calls it.
struct Message {
  std::optional<Collective> sent, received;
  bool taken = false;
};
using Pair = std::pair<int, int>;  // the ranks that send and receive

struct Clique {
  int size = 0;
  std::vector<bool> joined;
  std::vector<std::shared_ptr<Comm>> members;  // whose memory has not been given back
  std::map<uint64_t, Meeting> meetings;
  std::map<Pair, std::map<uint64_t, Message>> messages;  // of launches that have nothing else, by number
  std::map<uint64_t, std::vector<size_t>> windows;       // sizes of the n-th, of the ranks that came
};

struct Region {
  const std::byte *data;
  size_t bytes;
};

}  // namespace simulated::nccl

namespace fsdp::transport::nccl {

struct Window {
  simulated::nccl::Region region;
};

// ncclComm
struct Comm : std::enable_shared_from_this<Comm> {
  std::shared_ptr<simulated::nccl::Clique> clique;
  int rank = 0, device = 0;
  size_t copied_counts = SIZE_MAX;  // gathers over windows of more than that are by copy engines
  Config config;
  std::string name, id;
  int polls = 0;  // left until what was called is done
  std::vector<std::pair<std::vector<simulated::nccl::Collective>, fsdp_stream>> pending;
  uint64_t launched = 0;                             // on streams
  uint64_t ran = 0;                                  // ... of them those that all ranks have
  std::map<simulated::nccl::Pair, uint64_t> passed;  // messages of launches that have nothing else
  uint64_t windows_made = 0;
  bool joining = false, hangs = false, waits_for_windows = false, ending = false, finalized = false;
  bool ended = false;  // aborted or destroyed, though its memory may still be there
  // Shared with those that are split off, where it was made so: an abort of one ends all of them.
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  std::shared_ptr<Comm> splitting;  // a child that is being made; written also if that fails
  Comm **split_to = nullptr;
  uint64_t splits_made = 0;
  bool split_off = false;
  int inside = 0;                                // threads that are in a call of it, which blocks
  bool launch_hangs = false, launching = false;  // a thread of NCCL's is at it
  Result error = success;                        // what every call returns from now on
  std::thread::id owner;                         // the rank that made it, also where ranks share a GPU
  int running = 0;                               // host functions
  std::vector<const std::vector<simulated::nccl::Collective> *> at_work;  // ... what they do
  int graphs = 0;                                                         // launches that graphs alive have captured
  std::vector<std::unique_ptr<Window>> windows;
  std::vector<std::unique_ptr<simulated::nccl::Region>> buffers;
};

}  // namespace fsdp::transport::nccl

namespace simulated::nccl {

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by unique id
  std::map<Comm *, std::shared_ptr<Comm>> comms;
  std::vector<std::shared_ptr<Comm>> gone;                                   // no handle is used again
  std::map<std::pair<int, std::thread::id>, std::map<Comm *, int>> running;  // kernels by (device, rank's thread)
  std::map<int, int> blocks;                                                 // of the kernels that each device holds
  std::map<std::string, std::optional<int64_t>> parameters;                  // NCCL's variables, as they were read
  std::array<int64_t, 40> knobs{}, counts{};
  std::vector<std::string> breaches;
  std::string shown;
  std::string last_error;
  uint64_t ids = 0;

  int64_t &knob(Knob which) { return knobs[static_cast<size_t>(which)]; }
  int64_t &count(Count which) { return counts[static_cast<size_t>(which)]; }
  void breach(const Comm *comm, const std::string &what);
};

State &state();
int version();

// With the lock held. A communicator of a clique, which some ranks have joined before.
std::shared_ptr<Comm> make_comm(const std::string &clique, int ranks, int rank, const Config &config);
// Is what was called last done? Launches what was to be launched.
bool settled(Comm &comm);
void launch(Comm &comm);
// The child that is being split off will not be one: its handle is written all the same.
void give_up_split(Comm &comm);
// Without. As long as its kernels run, and of the last rank of the process those of all.
void abort(const std::shared_ptr<Comm> &comm);
void destroy(const std::shared_ptr<Comm> &comm);
// With it, which is let go meanwhile: no kernel of the rank's GPU runs, for what is unmapped may be in use.
void await_gpu(std::unique_lock<std::mutex> &lock, const Comm &comm);
// What NCCL's variable of this name (without NCCL_) says; nothing: it is not set. Read once, as NCCL does, until
// reset().
std::optional<int64_t> parameter(const std::string &name);
// As NCCL fills in and changes what it was given.
void override_by_environment(Config &config);
// SIMULATED_NCCL.
std::array<int64_t, 40> first_knobs();
size_t size_of(DataType type);
bool is_message(const Collective &call);
// What the peer of a message calls for it, in a launch that all have come to; NULL: nothing.
const Collective *counterpart(const Comm &comm, const Meeting &meeting, size_t index);
// What rank `comm` gets of a launch that all have come to, in memory of its own, in the order of the collectives.
std::vector<std::vector<std::byte>> results(const Comm &comm, const Meeting &meeting);
void store(const Comm &comm, const std::vector<Collective> &launch, const std::vector<std::vector<std::byte>> &results);
// Gathers whose bytes go without a kernel.
bool is_by_copies(const Comm &comm, const std::vector<Collective> &launch);
// What differs between ranks, or breaks a rule.
void inspect(const Comm &comm, const Meeting &meeting);
void inspect(const Comm &comm, const std::vector<Collective> &launch, size_t index, const Message &message);

}  // namespace simulated::nccl
