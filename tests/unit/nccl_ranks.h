// SPDX-License-Identifier: Apache-2.0
// Ranks run as threads, each with its own simulated GPU, and communicate through the simulated NCCL.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"
#include "simulated_cuda/simulated.h"
#include "simulated_nccl/simulated_nccl.h"
#include "sums.h"
#include "transport/team.h"

namespace fsdp::transport::test {

using simulated::nccl::Count;
using simulated::nccl::Knob;

inline const simulated::nccl::Control &control() {
  static const auto *found = static_cast<const simulated::nccl::Control *>(
      ::dlsym(::dlopen(SIMULATED_NCCL, RTLD_NOW | RTLD_NODELETE), simulated::nccl::control_symbol));
  return *found;
}

struct NcclRank {
  NcclRank(const std::shared_ptr<LocalJob> &job, uint32_t rank, int gpu, uint32_t timeout_ms,
           std::barrier<> &all_bodies)
      : bodies(all_bodies),
        waiter(failure, nullptr, nullptr, timeout_ms),
        device(device::create_cuda_device(gpu, {}, waiter, failure)),
        world(create_local_world(job, rank, waiter, failure, *device)) {}

  void make_team(DeviceTransport transport) {
    std::vector<uint32_t> all(world->size());
    for (uint32_t r = 0; r < all.size(); ++r) all[r] = r;
    host = world->create_team(all, "test team");
    team = create_device_team(host, *device, transport, waiter, failure);
  }
  uint32_t rank() const { return world->rank(); }
  uint32_t size() const { return world->size(); }
  void synchronize(device::Stream &stream) {
    const auto event = device->create_event();
    stream.record(*event);
    device->synchronize(*event);
    failure.check();
  }
  void meet() {
    const char mine = 0;
    std::vector<char> all(size());
    host->all_gather(&mine, 1, all.data(), "test meeting");
  }
  // If the others learn of a rank's failure before they fail themselves, they name the same cause. A rank that has left
  // names no cause.
  void fail_with_all() {
    failure.set(Error(FSDP_ABORTED, "the test aborts"));
    bodies.arrive_and_wait();
  }
  template <class T>
  std::vector<T> read(const void *from, uint64_t count) {
    std::vector<T> values(count);
    std::memcpy(values.data(), from, count * sizeof(T));  // simulated device memory is host memory
    return values;
  }

  std::barrier<> &bodies;
  Failure failure;
  Waiter waiter;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<World> world;
  std::shared_ptr<Team> host, team;
};

struct NcclJob {
  uint32_t size = 2;
  uint32_t timeout_ms = 20'000;
  bool share_gpu = false;
  DeviceTransport transport = DeviceTransport::nccl;
};

// Returns each rank's failure.
inline std::vector<Error> run_ranks(const NcclJob &job, const std::function<void(NcclRank &)> &body) {
  simulated::set_fair_queues(job.share_gpu);  // otherwise two of their streams may wait for each other for ever
  auto local = create_local_job(job.size);
  std::barrier bodies(job.size);
  std::vector<std::unique_ptr<NcclRank>> ranks;
  for (uint32_t r = 0; r < job.size; ++r)
    ranks.push_back(
        std::make_unique<NcclRank>(local, r, job.share_gpu ? 0 : static_cast<int>(r), job.timeout_ms, bodies));
  std::vector<Error> problems(job.size, Error(FSDP_OK, ""));
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < job.size; ++r)
    threads.emplace_back([&, r] {
      try {
        ranks[r]->make_team(job.transport);
        body(*ranks[r]);
      } catch (const Error &error) {
        problems[r] = error;
        ranks[r]->world->abort(error.what());
      }
      bodies.arrive_and_drop();
      ranks[r]->team.reset();
      ranks[r]->host.reset();
    });
  for (auto &thread : threads) thread.join();
  for (auto &rank : ranks) rank->world.reset();
  return problems;
}

inline void expect_well(const std::vector<Error> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r].message, "") << "rank " << r;
}

class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("FSDP_NCCL_LIBRARY", SIMULATED_NCCL, 1);
    for (const char *name : {"FSDP_NCCL_WINDOWS", "FSDP_NCCL_COPY_ENGINES", "NCCL_CTA_POLICY", "NCCL_SYM_CE_THRESHOLD",
                             "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_LAUNCH_ORDER_IMPLICIT", "FSDP_NCCL_MIN_CTAS",
                             "FSDP_NCCL_MAX_CTAS", "FSDP_NCCL_BLOCKING", "NCCL_COMM_BLOCKING",
                             "NCCL_COMM_SPLIT_SHARE_RESOURCES", "FSDP_NCCL_CGA_CLUSTER_SIZE", "FSDP_NCCL_NVLS_CTAS"})
      ::unsetenv(name);
    control().reset();
    simulated::set_device_count(4);
    control().set(Knob::in_progress_polls, 2);
  }
  // Checks that NCCL was used only in ways that it allows, and that nothing is left.
  void TearDown() override {
    EXPECT_STREQ(control().breaches(), "");
    EXPECT_EQ(control().count(Count::communicators), 0);
    EXPECT_EQ(control().count(Count::windows), 0);
    EXPECT_EQ(control().count(Count::buffers), 0);
  }
};

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class Call>
Error error_of(Call &&call) {
  try {
    call();
  } catch (const Error &error) {
    return error;
  }
  return Error(FSDP_OK, "no error");
}

}  // namespace fsdp::transport::test
