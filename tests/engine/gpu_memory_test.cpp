// SPDX-License-Identifier: Apache-2.0
// Models on GPUs take the memory that was planned, for the transport that they name or, without a name, for the one
// that the seal chose. NCCL is a look-alike, and all tests run on the simulated CUDA.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "device.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

Scenario memory_scenario(uint32_t ranks, fsdp_device_transport transport,
                         fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  setup.steps = 1;
  setup.model.reduce_dtype = FSDP_BFLOAT16;
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = transport;
  return setup;
}

Memory plan_of(const Scenario &setup, uint32_t r) {
  fsdp_context *planning = nullptr;
  FSDP(fsdp_create_plan_context(setup.ranks, r, &setup.context, &planning));
  Memory planned;
  {
    const Rank rank(planning, setup);
    planned = memory_of(rank.model, r);
  }
  fsdp_destroy_context(planning);
  return planned;
}

void expect_equal(const std::array<uint64_t, last_role + 1> &a, const std::array<uint64_t, last_role + 1> &b,
                  const std::string &what) {
  for (int role = 0; role <= last_role; ++role) EXPECT_EQ(a[role], b[role]) << what << ", role " << role;
}

void expect_as_planned(const Scenario &setup, const std::string &what) {
  const auto outcomes = train_threads(setup);
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    expect_equal(outcomes[r].stats.allocated_bytes, outcomes[r].memory.role_bytes, what + ": allocated and told");
    expect_equal(plan_of(setup, r).role_bytes, outcomes[r].memory.role_bytes, what + ": planned and told");
  }
}

// Sets the variable for this process, in which several tests run one after another.
void let_nccl_share_gpus(bool allowed) { ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed ? "1" : "0", 1); }

TEST(GpuMemory, ATransportThatIsNamedIsPlannedExactly) {
  let_nccl_share_gpus(true);
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const fsdp_device_transport transport : {FSDP_TRANSPORT_NCCL, FSDP_TRANSPORT_STAGING})
      for (const uint32_t ranks : {1u, 2u}) {
        Scenario setup = memory_scenario(ranks, transport, strategy);
        const std::string what = "transport " + std::to_string(transport) + ", ranks " + std::to_string(ranks);
        expect_as_planned(setup, what);
        setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
        expect_as_planned(setup, what + ", forced");
      }
}

// Gradients that travel in 16 bits are received in a separate buffer, in the gradient itself, or in a separate buffer
// because the gradient has the sums.
TEST(GpuMemory, ReceiveBuffersArePlannedExactly) {
  let_nccl_share_gpus(true);
  for (const fsdp_device_transport transport : {FSDP_TRANSPORT_NCCL, FSDP_TRANSPORT_STAGING})
    for (const fsdp_dtype grad : {FSDP_BFLOAT16, FSDP_FLOAT32})
      for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST})
        for (const uint32_t ranks : {1u, 3u}) {
          Scenario setup = memory_scenario(ranks, transport);
          setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
          setup.model.grad_dtype = grad;
          setup.model.reduce_policy = policy;
          expect_as_planned(setup, "transport " + std::to_string(transport) + ", grad " + std::to_string(grad) +
                                       ", policy " + std::to_string(policy) + ", ranks " + std::to_string(ranks));
        }
}

TEST(GpuMemory, MemoryOfReplicasIsAsPlanned) {
  let_nccl_share_gpus(true);
  for (const fsdp_device_transport transport : {FSDP_TRANSPORT_NCCL, FSDP_TRANSPORT_STAGING})
    for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM}) {
      Scenario setup = memory_scenario(4, transport);
      setup.mesh.replicate_size = 2;
      setup.mesh.shard_size = 2;
      setup.model.outer_strategy = outer;
      expect_as_planned(setup, "transport " + std::to_string(transport) + ", outer " + std::to_string(outer));
    }
}

// A plan refuses what a run would refuse.
TEST(GpuMemory, APlanRefusesNcclBetweenHosts) {
  let_nccl_share_gpus(true);
  Scenario setup = memory_scenario(4, FSDP_TRANSPORT_NCCL);
  setup.context.ranks_per_host = 2;
  try {
    (void)plan_of(setup, 1);
    FAIL() << "planned";
  } catch (const Failure &failure) {
    EXPECT_EQ(failure.status, FSDP_UNSUPPORTED);
    EXPECT_NE(failure.message.find("FSDP_TRANSPORT_NCCL: the 2 ranks from 1 to 3"), std::string::npos)
        << failure.message;
  }
}

// NCCL needs most memory for gradients, staging for the bytes on their way.
std::array<uint64_t, last_role + 1> most_of(Scenario setup, uint32_t r) {
  setup.context.device_transport = FSDP_TRANSPORT_NCCL;
  const Memory nccl = plan_of(setup, r);
  setup.context.device_transport = FSDP_TRANSPORT_STAGING;
  Memory most = plan_of(setup, r);
  EXPECT_GT(nccl.role_bytes[FSDP_ROLE_REDUCE], most.role_bytes[FSDP_ROLE_REDUCE]);
  most.role_bytes[0] += nccl.role_bytes[FSDP_ROLE_REDUCE] - most.role_bytes[FSDP_ROLE_REDUCE];
  most.role_bytes[FSDP_ROLE_REDUCE] = nccl.role_bytes[FSDP_ROLE_REDUCE];
  return most.role_bytes;
}

TEST(GpuMemory, TransportChosenByTheSealIsReported) {
  for (const bool nccl : {true, false}) {
    let_nccl_share_gpus(nccl);
    Scenario setup = memory_scenario(2, 0);
    setup.model.grad_dtype = FSDP_BFLOAT16;
    Scenario named = setup;
    named.context.device_transport = nccl ? FSDP_TRANSPORT_NCCL : FSDP_TRANSPORT_STAGING;
    const auto outcomes = train_threads(setup);
    for (uint32_t r = 0; r < setup.ranks; ++r) {
      const std::string what = nccl ? "NCCL was chosen" : "staging was chosen";
      expect_equal(outcomes[r].stats.allocated_bytes, outcomes[r].memory.role_bytes, what + ": allocated and told");
      expect_equal(outcomes[r].memory.role_bytes, plan_of(named, r).role_bytes, what + ": as if it had been named");
      expect_equal(plan_of(setup, r).role_bytes, most_of(setup, r), what + ": planned is the most that it can be");
    }
  }
}

// The warnings at the seals of ranks that share a GPU, if CUDA has `queues` queues. NULL stands for CUDA's default
// number.
std::string lines_of(uint32_t ranks, fsdp_device_transport transport, const char *queues) {
  queues ? ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues, 1) : ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  Scenario setup = memory_scenario(ranks, transport);
  std::mutex mutex;
  std::pair<std::mutex &, std::string> log(mutex, "");
  setup.context.log_data = &log;
  setup.context.log = [](void *data, fsdp_log_level level, const char *line) {
    auto &[guard, lines] = *static_cast<std::pair<std::mutex &, std::string> *>(data);
    const std::lock_guard lock(guard);
    if (level == FSDP_LOG_WARNING) lines += std::string(line) + '\n';
  };
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    { Rank rank(context, setup); }
    FSDP(fsdp_close_context(context));
  });
  return log.second;
}

// Any two streams of these ranks may share a queue. Over NCCL they are warned; over staging it does no harm.
TEST(GpuMemory, RanksThatShareTheQueuesOfAGpuOverNcclAreWarned) {
  let_nccl_share_gpus(true);
  const std::string lines = lines_of(2, FSDP_TRANSPORT_NCCL, nullptr);
  for (const char *word : {"2 ranks are threads of one process and share GPU 0 over NCCL", "into 8 queues",
                           "CUDA_DEVICE_MAX_CONNECTIONS, at most 32", "FSDP_TRANSPORT_STAGING"})
    EXPECT_NE(lines.find(word), std::string::npos) << lines;
  EXPECT_EQ(lines.find("2 ranks are"), lines.rfind("2 ranks are")) << lines;  // only one rank warns
  EXPECT_NE(lines_of(2, FSDP_TRANSPORT_NCCL, "99").find("into 32 queues"), std::string::npos);
  EXPECT_EQ(lines_of(1, FSDP_TRANSPORT_NCCL, "1"), "");
  EXPECT_EQ(lines_of(5, FSDP_TRANSPORT_STAGING, "1"), "");
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}

// If a program names no device, all ranks are on GPU 0. If it names no transport, it did not ask for staging.
TEST(GpuMemory, RanksOnOneGpuThatNcclRefusesAreWarned) {
  let_nccl_share_gpus(false);
  const std::string lines = lines_of(2, 0, nullptr);
  for (const char *word : {"ranks 0 and 1 share a GPU", "device_index", "FSDP_TRANSPORT_STAGING"})
    EXPECT_NE(lines.find(word), std::string::npos) << lines;
  EXPECT_EQ(lines.find("share a GPU"), lines.rfind("share a GPU")) << lines;  // only one rank warns
  EXPECT_EQ(lines_of(2, FSDP_TRANSPORT_STAGING, nullptr), "");
  let_nccl_share_gpus(true);
}

struct Made {
  uint64_t pinned = 0, told = 0;
};

Made make(const Scenario &setup) {
  Made made;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    const auto meet = [&] {
      double one = 1;
      FSDP(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM));
    };
    meet();
    if (r == 0) made = {simulated::pinned_bytes(), rank.stats().allocated_bytes[FSDP_ROLE_STAGING]};
    meet();
    FSDP(fsdp_close_context(context));
  });
  return made;
}

// 8 bytes of each element of the largest group, and 4 KiB for each rank, in whole 64 KiB; never more than 4 MiB.
uint64_t slot_bytes(const Scenario &setup) {
  uint64_t largest = 0;
  for (const GroupDef &group : setup.groups) {
    uint64_t elements = 0;
    for (const ParamDef &param : group.params) elements += param.count();
    largest = std::max(largest, elements);
  }
  constexpr uint64_t kib = 1024;
  return std::min((largest * 8 + setup.ranks * 4 * kib + 64 * kib - 1) / (64 * kib) * 64 * kib, 4 * 1024 * kib);
}

// The memory that the library reports is what it asked CUDA for. Staging has 4 slots for gathers and 4 for reduces of
// each of two ranks, in memory that each rank pins in its own view. NCCL has no slots. Events have pinned words too.
TEST(GpuMemory, ReportedBytesAreThoseThatCudaGave) {
  let_nccl_share_gpus(true);
  constexpr uint64_t ranks = 2, views = 2;
  const auto make_over = [](fsdp_device_transport transport) {
    Scenario setup = memory_scenario(ranks, transport);
    setup.groups = equal_groups(2, 256, 256);
    return std::pair(make(setup), slot_bytes(setup));
  };
  const auto [staging, slot] = make_over(FSDP_TRANSPORT_STAGING);
  const Made nccl = make_over(FSDP_TRANSPORT_NCCL).first;
  EXPECT_NEAR(static_cast<double>(staging.pinned - nccl.pinned), static_cast<double>(views * ranks * 8 * slot),
              static_cast<double>(slot));
  EXPECT_EQ(staging.told - nccl.told, 2 * 5 * slot - 2 * sizeof(float));
}

using Lines = std::vector<std::string>;
void keep_line(void *lines, fsdp_log_level, const char *line) { static_cast<Lines *>(lines)->push_back(line); }

TEST(GpuMemory, WhichGpuARankHasIsLogged) {
  Lines lines;
  Scenario setup = memory_scenario(1, FSDP_TRANSPORT_STAGING);
  setup.context.log = keep_line;
  setup.context.log_data = &lines;
  setup.context.log_level = FSDP_LOG_INFO;
  const auto expect_logged = [&](fsdp_context *context) {
    fsdp_destroy_context(context);
    const auto is_of_the_gpu = [](const std::string &line) { return line.find("rank 0: GPU 0 (") != line.npos; };
    EXPECT_EQ(std::count_if(lines.begin(), lines.end(), is_of_the_gpu), 1);
    lines.clear();
  };
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
  expect_logged(context);
  expect_logged(join(setup, 0, "which-gpu-" + std::to_string(::getpid())));
}

// A GPU that stands still while a model is destroyed in the middle of a gather.
TEST(GpuMemory, MemoryKeptByAStuckGpuIsLoggedOnce) {
  Scenario setup = memory_scenario(1, FSDP_TRANSPORT_STAGING);
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  // The end of the context waits three times as long.
  setup.context.timeout_ms = 1200;
  Lines lines;
  setup.context.log = keep_line;
  setup.context.log_data = &lines;
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
  std::unique_ptr<simulated::Hold> hold;
  {
    Rank rank(context, setup);
    rank.load();
    hold = std::make_unique<simulated::Hold>();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
  }
  fsdp_destroy_context(context);
  hold.reset();
  std::erase_if(lines, [](const std::string &line) { return line.find("left to the process") == std::string::npos; });
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("rank 0: GPU 0: "), std::string::npos) << lines[0];
}

}  // namespace
