// SPDX-License-Identifier: Apache-2.0
// Tests with real GPUs and the real NCCL: one rank alone, and two processes that share a GPU if NCCL's version allows
// that. They are skipped without NCCL or a GPU, and say why. Each rank is a process, because CUDA does not survive a
// fork.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "transport/nccl/library.h"
#include "transport/team.h"

namespace fsdp::transport::test {
namespace {

constexpr int skipped = 77;

struct GpuRank {
  explicit GpuRank(const WorldOptions &options)
      : waiter(failure, nullptr, nullptr, 60'000),
        device(device::create_cuda_device(0, {}, waiter, failure)),
        world(create_process_world(options, waiter, failure, *device)) {
    std::vector<uint32_t> all(options.size);
    for (uint32_t r = 0; r < options.size; ++r) all[r] = r;
    team = create_device_team(world->create_team(all, "gpu test"), *device, DeviceTransport::nccl, waiter, failure);
  }
  ~GpuRank() { team.reset(); }
  void synchronize(device::Stream &stream) {
    const auto event = device->create_event();
    stream.record(*event);
    device->synchronize(*event);
    failure.check();
  }

  Failure failure;
  Waiter waiter;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<World> world;
  std::shared_ptr<Team> team;
};

// Returns the processes' exit codes; 0 means success.
std::vector<int> run_processes(uint32_t size, const std::function<int(GpuRank &)> &body) {
  const std::string name = "gpu-nccl-" + std::to_string(::getpid()) + '-' + std::to_string(size);
  std::vector<pid_t> processes;
  for (uint32_t r = 0; r < size; ++r) {
    std::fflush(nullptr);
    const pid_t process = ::fork();
    if (process) {
      processes.push_back(process);
      continue;
    }
    int code = 1;
    try {
      GpuRank rank({r, size, name, "secret", 60'000});
      for (const Note &note : rank.team->notes()) std::fprintf(stderr, "rank %u: %s\n", r, note.text.c_str());
      code = body(rank);
    } catch (const Error &error) {
      std::fprintf(stderr, "rank %u: %s\n", r, error.what());
      code = error.status == FSDP_UNSUPPORTED ? skipped : 1;
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

float value_of(uint32_t rank, uint64_t i) { return static_cast<float>(i % 17) + static_cast<float>(rank); }

int fail_at(const char *what, uint64_t i, float seen, float expected) {
  std::fprintf(stderr, "%s: element %llu is %g, expected %g\n", what, static_cast<unsigned long long>(i),
               static_cast<double>(seen), static_cast<double>(expected));
  return 1;
}

// Makes twenty steps of a gather and a reduce on separate streams, in place and out of place.
int exchange(GpuRank &rank) {
  constexpr uint64_t shard = 1 << 20;
  const uint32_t size = rank.team->size(), mine = rank.team->rank();
  const uint64_t bytes = shard * sizeof(float);
  const auto gathers = rank.device->create_stream("gather"), reduces = rank.device->create_stream("reduce");
  const auto weights = rank.team->create_parts(bytes, "weights"),
             grads = rank.team->create_parts(size * bytes, "grads");
  const auto pool = rank.device->allocate(size * bytes, "pool"), to = rank.device->allocate(bytes, "to");
  rank.team->register_memory(pool->data(), size * bytes, "pool");
  const auto gather = rank.team->create_collectives("gather"), reduce = rank.team->create_collectives("reduce");
  std::vector<float> values(size * shard);
  for (uint64_t i = 0; i < values.size(); ++i) values[i] = value_of(mine, i);
  std::byte *own_grads = grads->writable() + mine * size * bytes;
  rank.device->transfer(weights->writable() + mine * bytes, FSDP_FLOAT32, values.data(), FSDP_FLOAT32, shard);
  const Gather gathered{Part::in(*weights, 0, bytes, mine), pool->data(), bytes};
  const Sum reduced{.from = Part::in(*grads, 0, size * bytes, mine),
                    .to = Part::alone(to->data()),
                    .count = size * shard,
                    .factor = 0.5F};
  for (int step = 0; step < 20; ++step) {
    rank.device->transfer(own_grads, FSDP_FLOAT32, values.data(), FSDP_FLOAT32, values.size());
    gather->gather_stable({&gathered, 1}, {1, "layer"}, *gathers);
    reduce->sum({&reduced, 1}, false, {1, "layer"}, *reduces);
    rank.synchronize(*gathers);
    rank.synchronize(*reduces);
  }
  std::vector<float> seen(size * shard);
  rank.device->transfer(seen.data(), FSDP_FLOAT32, pool->data(), FSDP_FLOAT32, seen.size());
  for (uint64_t i = 0; i < seen.size(); ++i)
    if (const float expected = value_of(static_cast<uint32_t>(i / shard), i % shard); seen[i] != expected)
      return fail_at("gather", i, seen[i], expected);
  rank.device->transfer(seen.data(), FSDP_FLOAT32, to->data(), FSDP_FLOAT32, shard);
  for (uint64_t i = 0; i < shard; ++i) {
    float expected = 0;
    for (uint32_t r = 0; r < size; ++r) expected += value_of(r, mine * shard + i);
    if (seen[i] != expected * 0.5F) return fail_at("reduce", i, seen[i], expected * 0.5F);
  }
  reduce->barrier({2, "end"}, *reduces);
  rank.synchronize(*reduces);
  return 0;
}

bool ends(const device::Event &event) {
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!event.done() && std::chrono::steady_clock::now() < last)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return event.done();
}

// One rank's GPU waits in two communicators for a rank that does not come. A failure frees both streams.
int fail_while_waiting(GpuRank &rank) {
  constexpr uint64_t bytes = 1 << 20;
  const auto gathers = rank.device->create_stream("gather"), reduces = rank.device->create_stream("reduce");
  const auto weights = rank.team->create_parts(bytes, "weights");
  const auto pool = rank.device->allocate(rank.team->size() * bytes, "pool");
  rank.team->register_memory(pool->data(), rank.team->size() * bytes, "pool");
  const auto gather = rank.team->create_collectives("gather"), reduce = rank.team->create_collectives("reduce");
  const auto gathered = rank.device->create_event(), reduced = rank.device->create_event();
  const Gather span{Part::in(*weights, 0, bytes, rank.team->rank()), pool->data(), bytes};
  const auto enqueue = [&] {
    gather->gather({&span, 1}, {1, "layer"}, *gathers);
    reduce->barrier({2, "end"}, *reduces);
    gathers->record(*gathered);
    reduces->record(*reduced);
  };
  enqueue();  // the first calls connect the ranks
  rank.synchronize(*gathers);
  rank.synchronize(*reduces);
  if (rank.team->rank() == 0) enqueue();
  rank.team->all_gather({}, "both are there");
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const bool waits = rank.team->rank() != 0 || !gathered->done();
  rank.team->all_gather({}, "both have looked");  // if a rank fails before that, it frees the other rank's GPU
  if (!waits) return 1;                           // nothing is tested
  rank.failure.set(Error(FSDP_ABORTED, "the test aborts"));
  return ends(*gathered) && ends(*reduced) ? 0 : 1;
}

// Does not use CUDA in this process, because the children need it.
std::string missing() {
  if (::access("/dev/nvidiactl", F_OK) != 0) return "no GPU: /dev/nvidiactl is not there";
  try {
    (void)nccl::load_library();
  } catch (const Error &error) {
    return error.message;
  }
  return {};
}

TEST(NcclGpu, OneRankAloneGathersAndReduces) {
  if (const std::string why = missing(); !why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(run_processes(1, exchange), std::vector<int>{0});
}

TEST(NcclGpu, TwoRanksShareAGpu) {
  if (const std::string why = missing(); !why.empty()) GTEST_SKIP() << why;
  if (const int version = nccl::load_library()->version; version < nccl::Library::ranks_share_gpu)
    GTEST_SKIP() << "NCCL " << nccl::version_text(version) << " bears one rank a GPU";
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_EQ(run_processes(2, exchange), (std::vector<int>{0, 0}));
}

TEST(NcclGpu, AFailureFreesAGpuThatWaits) {
  if (const std::string why = missing(); !why.empty()) GTEST_SKIP() << why;
  if (const int version = nccl::load_library()->version; version < nccl::Library::ranks_share_gpu)
    GTEST_SKIP() << "NCCL " << nccl::version_text(version) << " bears one rank a GPU";
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_EQ(run_processes(2, fail_while_waiting), (std::vector<int>{0, 0}));
}

TEST(NcclGpu, RanksThatShareAGpuAreRefusedUnlessAllowed) {
  if (const std::string why = missing(); !why.empty()) GTEST_SKIP() << why;
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  EXPECT_EQ(run_processes(2, exchange), (std::vector<int>{skipped, skipped}));
}

}  // namespace
}  // namespace fsdp::transport::test
