// SPDX-License-Identifier: Apache-2.0
// Defines communicators, and the structures in which their ranks meet.
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

using namespace fsdp::transport::nccl;  // C types belong to the interface

enum class Kind { all_gather, reduce_scatter, all_reduce, broadcast, send, receive };

// One rank's call of a collective, or of a message to or from a peer.
struct Collective {
  Kind kind;
  const std::byte *from;
  std::byte *to;
  size_t count;
  DataType type;
  Operation operation;
  int root;                // messages: the peer
  uint32_t readers = ~0u;  // bit i: GPU i may access the memory that is read here
};

// The ranks of a communicator meet here in their n-th launch.
struct Meeting {
  // Indexed by rank. If a rank is aborted after all have arrived, its kernel ends while others still read its launch.
  std::vector<std::shared_ptr<const std::vector<Collective>>> launches;
  size_t came = 0, read = 0;
};

// Holds a message as its sender and its receiver call it.
struct Message {
  std::optional<Collective> sent, received;
  bool taken = false;
};
using Pair = std::pair<int, int>;  // the ranks that send and receive

struct Clique {
  int size = 0;
  std::vector<bool> joined;
  std::vector<std::shared_ptr<Comm>> members;  // ranks that have not given back their memory
  std::map<uint64_t, Meeting> meetings;
  std::map<Pair, std::map<uint64_t, Message>> messages;  // numbered messages of launches that have only messages
  std::map<uint64_t, std::vector<size_t>> windows;       // sizes of the n-th window, from the ranks that arrived
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
  size_t copied_counts = SIZE_MAX;  // copy engines run gathers over windows larger than this
  Config config;
  std::string name, id;
  int polls = 0;  // steps left until the last operation is done
  std::vector<std::pair<std::vector<simulated::nccl::Collective>, fsdp_stream>> pending;
  uint64_t launched = 0;                             // launches on streams
  uint64_t ran = 0;                                  // ... that all ranks take part in
  std::map<simulated::nccl::Pair, uint64_t> passed;  // messages of launches that have only messages
  uint64_t windows_made = 0;
  bool joining = false, hangs = false, waits_for_windows = false, ending = false, finalized = false;
  bool ended = false;  // aborted or destroyed; its memory may still exist
  // Communicators that were split off with shared resources share this flag: an abort of one ends all of them.
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  std::shared_ptr<Comm> splitting;  // a child that is being made; its handle is written even if that fails
  Comm **split_to = nullptr;
  uint64_t splits_made = 0;
  bool split_off = false;
  int inside = 0;                                // threads in a blocking call on it
  bool launch_hangs = false, launching = false;  // a thread of NCCL's works on it
  Result error = success;                        // every call returns this from now on
  std::thread::id owner;                         // the rank that made it, even if ranks share a GPU
  int running = 0;                               // host functions on streams
  std::vector<const std::vector<simulated::nccl::Collective> *> at_work;  // ... the work of each
  int graphs = 0;                                                         // launches that existing graphs have captured
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
  std::vector<std::shared_ptr<Comm>> gone;                                   // no handle is used twice
  std::map<std::pair<int, std::thread::id>, std::map<Comm *, int>> running;  // kernels by (device, rank's thread)
  std::map<int, int> blocks;                                 // multiprocessors that the kernels hold on each device
  std::map<std::string, std::optional<int64_t>> parameters;  // NCCL's variables, as they were read
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

// The caller must hold the lock. Makes a communicator of a clique that other ranks may have joined.
std::shared_ptr<Comm> make_comm(const std::string &clique, int ranks, int rank, const Config &config);
// Returns whether the last operation is done, and launches pending work. The caller must hold the lock.
bool settled(Comm &comm);
void launch(Comm &comm);
// Fails the child that is being split off. Its handle is written nevertheless.
void give_up_split(Comm &comm);
// The caller must not hold the lock. Waits while kernels of this rank run; the last rank of the process waits for the
// kernels of all.
void abort(const std::shared_ptr<Comm> &comm);
void destroy(const std::shared_ptr<Comm> &comm);
// The caller must hold the lock, which is released meanwhile. Waits until no kernel of the rank's GPU runs, because a
// kernel may use the memory that is to be unmapped.
void await_gpu(std::unique_lock<std::mutex> &lock, const Comm &comm);
// Returns the value of NCCL's variable of this name (without NCCL_), or nothing if it is not set. Reads it once until
// reset(), as NCCL does.
std::optional<int64_t> parameter(const std::string &name);
// Fills in and changes the configuration as NCCL does.
void override_by_environment(Config &config);
// Reads SIMULATED_NCCL.
std::array<int64_t, 40> first_knobs();
size_t size_of(DataType type);
bool is_message(const Collective &call);
// Returns the peer's call for this message in a launch that all ranks have reached, or NULL if the peer has no such
// call.
const Collective *counterpart(const Comm &comm, const Meeting &meeting, size_t index);
// Returns the results for rank `comm` of a launch that all ranks have reached, in memory of its own, in the order of
// the collectives.
std::vector<std::vector<std::byte>> results(const Comm &comm, const Meeting &meeting);
void store(const Comm &comm, const std::vector<Collective> &launch, const std::vector<std::vector<std::byte>> &results);
// Returns whether all of these are gathers that copy engines run without a kernel.
bool is_by_copies(const Comm &comm, const std::vector<Collective> &launch);
// Reports differences between the ranks' calls, and breaches of rules.
void inspect(const Comm &comm, const Meeting &meeting);
void inspect(const Comm &comm, const std::vector<Collective> &launch, size_t index, const Message &message);

}  // namespace simulated::nccl
