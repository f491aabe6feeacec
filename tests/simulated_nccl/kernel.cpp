// SPDX-License-Identifier: Apache-2.0
// Communicators launch kernels that meet those of other ranks, on the streams of the simulated CUDA.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "simulated_nccl/state.h"

namespace simulated::nccl {
namespace {

using Lock = std::unique_lock<std::mutex>;

// One launch as the stream sees it. A graph may run a captured launch many times.
struct Kernel {
  std::shared_ptr<Comm> comm;
  std::vector<Collective> launch;
  bool captured;
};

// Numbers of NCCL's channels on such a GPU, for collectives and for messages.
constexpr int usual_blocks = 24, message_blocks = 32, usual_multiprocessors = 132;

int blocks_of(const Comm &comm, const std::vector<Collective> &launch) {
  int blocks = std::any_of(launch.begin(), launch.end(), is_message) ? message_blocks : usual_blocks;
  if (comm.config.max_ctas != undefined) blocks = std::min(blocks, comm.config.max_ctas);
  return std::max(blocks, comm.config.min_ctas);
}

// A kernel starts only when each of its blocks has a free multiprocessor, and an abort does not change that.
class Room {
 public:
  Room(Lock &lock, const Comm &comm, const std::vector<Collective> &launch)
      : taken_(state().blocks[comm.device]), blocks_(is_by_copies(comm, launch) ? 0 : blocks_of(comm, launch)) {
    state().changed.wait(lock, [&] { return taken_ + blocks_ <= all(); });
    taken_ += blocks_;
  }
  ~Room() {
    taken_ -= blocks_;
    state().changed.notify_all();
  }
  Room(const Room &) = delete;
  Room &operator=(const Room &) = delete;

 private:
  // A kernel with more blocks than the GPU can hold gets the GPU for itself.
  int64_t all() const {
    if (state().knob(Knob::endless_room)) return INT64_MAX;
    const int64_t wanted = state().knob(Knob::multiprocessors);
    return std::max<int64_t>(wanted ? wanted : usual_multiprocessors, blocks_);
  }

  int &taken_;
  const int blocks_;
};

// Kernels of two communicators on one GPU may wait for each other for ever, unless they are launched in one order.
class Running {
 public:
  Running(Comm &comm, const std::vector<Collective> &launch) : comm_(comm), launch_(launch) {
    ++comm_.running;
    ++state().count(Count::running);
    comm_.at_work.push_back(&launch_);
    auto &here = state().running[{comm_.device, comm_.owner}];
    ++here[&comm_];
    if (here.size() > 1 && comm_.config.launch_order_implicit != 1)
      state().breach(&comm_, "kernels of two communicators run on one GPU at the same time");
  }
  ~Running() {
    auto &here = state().running[{comm_.device, comm_.owner}];
    if (--here[&comm_] == 0) here.erase(&comm_);
    --comm_.running;
    --state().count(Count::running);
    std::erase(comm_.at_work, &launch_);
    state().changed.notify_all();
  }

 private:
  Comm &comm_;
  const std::vector<Collective> &launch_;
};

// A copy engine waits only for a peer's word in memory.
template <class Come>
bool await(Lock &lock, const Comm &comm, bool by_copies, Come &&come) {
  const auto given_up = [&] { return by_copies ? state().knob(Knob::let_copies_go) != 0 : *comm.aborted; };
  state().changed.wait(lock, [&] { return given_up() || come(); });
  return !given_up();
}

// Handles a launch that has only messages. It waits only for the ranks that send to it or receive from it. The n-th
// message that one rank sends to another is the n-th that the other receives.
class Messages {
 public:
  Messages(Comm &comm, const std::vector<Collective> &launch) : comm_(comm), launch_(launch) {
    for (const Collective &call : launch) {
      const Pair pair = call.kind == Kind::send ? Pair(comm.rank, call.root) : Pair(call.root, comm.rank);
      all_.push_back({pair, comm.passed[pair]++});
      mine(all_.size() - 1) = call;
    }
    state().changed.notify_all();
  }
  bool met() {
    for (size_t i = 0; i < all_.size(); ++i)
      if (!find(i).sent || !find(i).received) return false;
    return true;
  }
  // A peer may not receive a message from memory that is gone.
  void withdraw() {
    for (size_t i = 0; i < all_.size(); ++i) mine(i).reset();
  }
  void inspect() {
    for (size_t i = 0; i < all_.size(); ++i) simulated::nccl::inspect(comm_, launch_, i, find(i));
  }
  // Copies without the lock. If a sender is aborted meanwhile, its messages remain.
  void take(Lock &lock) {
    std::vector<Collective> sent;
    for (size_t i = 0; i < all_.size(); ++i) sent.push_back(*find(i).sent);
    lock.unlock();
    for (size_t i = 0; i < all_.size(); ++i)
      if (launch_[i].kind == Kind::receive)
        std::memcpy(launch_[i].to, sent[i].from, sent[i].count * size_of(sent[i].type));
    lock.lock();
    for (size_t i = 0; i < all_.size(); ++i)
      if (launch_[i].kind == Kind::receive) find(i).taken = true;
    state().changed.notify_all();
  }
  // Checks the messages that this rank sends, because its peer may have forgotten the others.
  bool taken() {
    for (size_t i = 0; i < all_.size(); ++i)
      if (launch_[i].kind == Kind::send && !find(i).taken) return false;
    return true;
  }
  void forget() {
    for (size_t i = 0; i < all_.size(); ++i)
      if (launch_[i].kind == Kind::send) comm_.clique->messages[all_[i].first].erase(all_[i].second);
  }

 private:
  Message &find(size_t i) { return comm_.clique->messages[all_[i].first][all_[i].second]; }
  std::optional<Collective> &mine(size_t i) { return launch_[i].kind == Kind::send ? find(i).sent : find(i).received; }

  Comm &comm_;
  const std::vector<Collective> &launch_;
  std::vector<std::pair<Pair, uint64_t>> all_;
};

void pass(Lock &lock, Comm &comm, const std::vector<Collective> &launch) {
  Messages messages(comm, launch);
  if (!await(lock, comm, false, [&] { return messages.met(); })) return messages.withdraw();
  messages.inspect();
  messages.take(lock);
  if (await(lock, comm, false, [&] { return messages.taken(); })) messages.forget();
}

void meet(Lock &lock, Comm &comm, const std::vector<Collective> &launch) {
  const bool by_copies = is_by_copies(comm, launch);
  int64_t &hang = state().knob(Knob::hang_collective);
  if (hang > 0 && --hang == 0) return (void)await(lock, comm, by_copies, [] { return false; });
  if (std::all_of(launch.begin(), launch.end(), is_message)) return pass(lock, comm, launch);
  const uint64_t number = comm.ran++;
  const std::shared_ptr<Clique> clique = comm.clique;
  const auto size = static_cast<size_t>(clique->size);
  Meeting &meeting = clique->meetings[number];
  meeting.launches.resize(size);
  meeting.launches[static_cast<size_t>(comm.rank)] = std::make_shared<const std::vector<Collective>>(launch);
  ++meeting.came;
  state().changed.notify_all();
  if (!await(lock, comm, by_copies, [&] { return meeting.came == size; })) {
    if (meeting.came == size) return;
    // The rank left before the last one arrived, which waits in vain
    meeting.launches[static_cast<size_t>(comm.rank)] = nullptr;
    --meeting.came;
    return;
  }
  inspect(comm, meeting);
  lock.unlock();
  const auto mine = results(comm, meeting);
  lock.lock();
  ++meeting.read;
  state().changed.notify_all();
  if (!await(lock, comm, by_copies, [&] { return meeting.read >= size; })) return;
  lock.unlock();
  store(comm, launch, mine);
  lock.lock();
  if (++meeting.read == 2 * size) clique->meetings.erase(number);
}

#if CUDART_VERSION >= 13000
// The last graph that could launch it again is gone.
void forget_captured(void *data) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel *>(data));
  const Lock lock(state().mutex);
  --kernel->comm->graphs;
  state().changed.notify_all();
}

void keep_for_graph(fsdp_stream stream, Kernel *kernel) {
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
  cudaUserObject_t object = nullptr;
  const bool kept =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr) == cudaSuccess &&
      cudaUserObjectCreate(&object, kernel, forget_captured, 1, cudaUserObjectNoDestructorSync) == cudaSuccess &&
      cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess;
  if (kept)
    ++kernel->comm->graphs;
  else
    state().breach(kernel->comm.get(), "a graph that cannot be followed");
}
#else
void keep_for_graph(fsdp_stream, Kernel *) {}  // waits for ever
#endif

void run(void *data) {
  auto *kernel = static_cast<Kernel *>(data);
  {
    Lock lock(state().mutex);
    const Running running(*kernel->comm, kernel->launch);
    const Room room(lock, *kernel->comm, kernel->launch);
    if (!*kernel->comm->aborted) meet(lock, *kernel->comm, kernel->launch);
  }
  if (!kernel->captured) delete kernel;
}

}  // namespace

// NCCL launches no kernel for a rank that is alone. If the buffers differ, it copies on the stream, and no abort ends
// that copy.
void copy_alone(const Comm &comm, const std::vector<Collective> &collectives, fsdp_stream stream) {
  Meeting alone;
  alone.launches = {std::make_shared<const std::vector<Collective>>(collectives)};
  inspect(comm, alone);
  for (const Collective &call : collectives)
    if (call.from != call.to && !is_message(call))
      (void)cudaMemcpyAsync(call.to, call.from, call.count * size_of(call.type), cudaMemcpyDefault, stream);
}

// Releases the lock while CUDA may keep the caller waiting for room in a stream, because an abort may be needed to make
// room.
class Unlocked {
 public:
  Unlocked() { state().mutex.unlock(); }
  ~Unlocked() { state().mutex.lock(); }
};

void launch(Comm &comm) {
  const auto kept = comm.shared_from_this();
  for (auto &[collectives, stream] : std::exchange(comm.pending, {})) {
    if (comm.clique->size == 1 && !state().knob(Knob::lone_kernels)) {
      copy_alone(comm, collectives, stream);
      ++state().count(Count::launches);
      continue;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream, &status);
    const bool captured = status == cudaStreamCaptureStatusActive;
    auto *kernel = new Kernel{comm.shared_from_this(), std::move(collectives), captured};
    if (captured) keep_for_graph(stream, kernel);
    const bool launched = [&] {
      const Unlocked unlocked;
      return cudaLaunchHostFunc(stream, run, kernel) == cudaSuccess;
    }();
    if (!launched) {
      state().breach(&comm, "a launch that CUDA refuses");
      if (!captured) delete kernel;
    }
    ++comm.launched;
    ++state().count(Count::launches);
    if (comm.config.blocking != 1) ++state().count(Count::launch_threads);
  }
}

}  // namespace simulated::nccl
