// SPDX-License-Identifier: Apache-2.0
// Measures what the launch of a gather costs the calling thread over the real NCCL. It measures communicators that do
// not block (NCCL starts a thread for each launch) and communicators that block. The library uses a child that blocks,
// split off a parent that does not. Two processes share a GPU; if NCCL's version does not allow that, there is one
// rank. The output is the median of batches in microseconds, and the MiB of the GPU that both used meanwhile.
//
//   idle   nothing else is on the stream
//   busy   the stream has some milliseconds of work before, so that nothing that is launched runs meanwhile
//   end    from the first launch to the end of the last on the GPU, by launches
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "base/error.h"
#include "transport/nccl/library.h"

namespace {

using namespace fsdp;
using namespace fsdp::transport::nccl;
using Clock = std::chrono::steady_clock;

constexpr int launches = 100, batches = 11;
constexpr size_t bytes = 64 << 10, busy_bytes = size_t{1} << 30;

void check(int error, const char *what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %d\n", what, error);
  std::exit(1);
}

// Each rank sends this to the others: NCCL's name of a communicator, for each of the two kinds.
struct Ids {
  UniqueId of[3];
};
constexpr const char *kinds[] = {"one that does not block", "one that blocks", "a child that blocks"};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(const Library &library, int ranks, int rank, size_t kind, const UniqueId &id) : library_(library) {
    size_t before = 0, after = 0, total = 0;
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMalloc(&busy_, busy_bytes), "cudaMalloc");
    check(cudaMalloc(&to_, bytes * static_cast<size_t>(ranks)), "cudaMalloc");
    check(cudaMalloc(&from_, bytes), "cudaMalloc");
    check(cudaMemGetInfo(&before, &total), "cudaMemGetInfo");
    make(ranks, rank, kind, id);
    for (int i = 0; i < 20; ++i) launch();
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    check(cudaMemGetInfo(&after, &total), "cudaMemGetInfo");
    used_ = (static_cast<double>(before) - static_cast<double>(after)) / (1 << 20);
  }

  void run(const char *name, bool print) {
    std::vector<double> idle, busy, end;
    for (int i = 0; i < batches; ++i) {
      double whole = 0;
      idle.push_back(measure(false, whole));
      end.push_back(whole);
      busy.push_back(measure(true, whole));
    }
    if (print) std::printf("%-28s %8.2f %8.2f %8.2f %8.0f\n", name, median(idle), median(busy), median(end), used_);
  }

 private:
  void make(int ranks, int rank, size_t kind, const UniqueId &id) {
    Config config;
    config.version = static_cast<unsigned>(std::min(library_.version, Config::latest));
    config.blocking = kind == 1;
    config.split_share = kind == 2 ? 1 : undefined;
    const Result result = library_.ncclCommInitRankConfig(&comm_, ranks, id, rank, &config);
    if (result != in_progress) check(result, "ncclCommInitRankConfig");
    settle();
    if (kind != 2) return;
    config.blocking = 1;
    config.split_share = undefined;
    Comm *child = nullptr;
    const Result of_split = library_.ncclCommSplit(comm_, 0, rank, &child, &config);
    if (of_split != in_progress) check(of_split, "ncclCommSplit");
    settle();
    comm_ = child;
  }
  void settle() {
    Result state = in_progress;
    while (state == in_progress) check(library_.ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
    check(state, "NCCL's state");
  }
  void launch() {
    check(library_.ncclGroupStart(), "ncclGroupStart");
    const Result of_gather = library_.ncclAllGather(from_, to_, bytes, uint8, comm_, stream_);
    if (of_gather != in_progress) check(of_gather, "ncclAllGather");
    const Result result = library_.ncclGroupEnd();
    if (result != in_progress) check(result, "ncclGroupEnd");
    settle();
  }
  double measure(bool busy, double &whole) {
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (int i = 0; busy && i < 20; ++i) check(cudaMemsetAsync(busy_, 0, busy_bytes, stream_), "cudaMemsetAsync");
    const auto start = Clock::now();
    for (int i = 0; i < launches; ++i) launch();
    const std::chrono::duration<double, std::micro> host = Clock::now() - start;
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const std::chrono::duration<double, std::micro> all = Clock::now() - start;
    whole = all.count() / launches;
    return host.count() / launches;
  }

  const Library &library_;
  Comm *comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  void *busy_ = nullptr, *to_ = nullptr, *from_ = nullptr;
  double used_ = 0;
};

int run(int ranks, int rank, int in, int out) {
  check(cudaSetDevice(0), "cudaSetDevice");
  const auto library = load_library();
  Ids ids{};
  if (rank == 0) {
    for (UniqueId &id : ids.of) check(library->ncclGetUniqueId(&id), "ncclGetUniqueId");
    for (int r = 1; r < ranks; ++r) check(::write(out, &ids, sizeof ids) != sizeof ids, "write");
  } else {
    check(::read(in, &ids, sizeof ids) != sizeof ids, "read");
  }
  if (rank == 0) {
    std::printf("NCCL %s, %d rank%s, gathers of %zu KiB\n", version_text(library->version).c_str(), ranks,
                ranks == 1 ? "" : "s", bytes >> 10);
    std::printf("%-28s %8s %8s %8s %8s\n", "microseconds", "idle", "busy", "end", "MiB");
  }
  for (size_t kind = 0; kind < std::size(kinds); ++kind) {
    Bench bench(*library, ranks, rank, kind, ids.of[kind]);
    bench.run(kinds[kind], rank == 0);
    std::fflush(nullptr);
  }
  std::fflush(nullptr);
  ::_exit(0);  // no communicator is ended, because the peer may have left
}

}  // namespace

int main(int argc, char **argv) {
  if (::access("/dev/nvidiactl", F_OK) != 0) {
    std::puts("skipped: no GPU: /dev/nvidiactl is not there");
    return 77;
  }
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  if (ranks > 1) ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  int pipes[2];
  check(::pipe(pipes), "pipe");
  for (int r = 1; r < ranks; ++r)
    if (::fork() == 0) return run(ranks, r, pipes[0], pipes[1]);
  const pid_t first = ::fork();  // CUDA does not survive a fork
  if (first == 0) return run(ranks, 0, pipes[0], pipes[1]);
  int worst = 0, status = 0;
  for (int r = 0; r < ranks; ++r)
    if (::wait(&status) > 0 && status != 0) worst = 1;
  return worst;
}
