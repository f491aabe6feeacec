// SPDX-License-Identifier: Apache-2.0
#include "neighbours.h"

#include <atomic>
#include <cstdlib>
#include <thread>

#include "../engine/device.h"
#include "life.h"

namespace network {
namespace {

using nlohmann::json;
using Lines = std::vector<std::string>;

uint32_t variable(const char *name) {
  const char *value = std::getenv(name);
  if (!value) throw std::runtime_error(std::string(name) + " is not set");
  return static_cast<uint32_t>(std::stoul(value));
}

void keep_line(void *lines, fsdp_log_level, const char *line) { static_cast<Lines *>(lines)->push_back(line); }

// Rank 0 has made a gather, and the last host's ranks have made a reduce, that the other ranks have not made.
void begin_apart(harness::Rank &rank) {
  if (rank.rank == 0) {
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, harness::stream()));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, harness::stream()));
  }
  if (rank.rank < rank.setup.ranks / 2) return;
  harness::put_all(rank, 2, 1.0f);
  FSDP(fsdp_reduce_grad(rank.groups[2], FSDP_LAST, harness::stream()));
}

json live_one(const harness::Scenario &shared, uint32_t rank, bool discards, std::atomic<uint32_t> &training) {
  Lines lines;
  harness::Scenario scenario = shared;
  scenario.context.log = keep_line;
  scenario.context.log_data = &lines;
  scenario.context.log_level = FSDP_LOG_INFO;
  fsdp_context *context = nullptr;
  json result;
  try {
    const std::string rendezvous =
        std::string("tcp://") + std::getenv("MASTER_ADDR") + ":" + std::getenv("MASTER_PORT");
    context = harness::join(scenario, rank, rendezvous);
    {
      harness::Rank self(context, scenario);
      if (discards) {
        self.load();
        begin_apart(self);
        FSDP(fsdp_discard_step(self.model, harness::stream()));
        FSDP(fsdp_begin_update(self.model, harness::stream()));
      }
      ++training;
      harness::Outcome outcome;
      harness::train(self, outcome);
      FSDP(fsdp_close_context(context));
      result = describe(outcome);
    }
  } catch (const harness::Failure &failure) {
    result = describe(failure, Stage::start);
  }
  const double start = harness::now();
  fsdp_destroy_context(context);
  result["destroy_seconds"] = harness::now() - start;
  result["log"] = lines;
  result["rank"] = rank;
  return result;
}

// chosen: no transport is named, so the library uses NCCL inside a host if NCCL can serve the ranks.
fsdp_device_transport transport_of(const std::string &gpus) {
  if (gpus == "chosen") return 0;
  return gpus == "nccl" ? FSDP_TRANSPORT_NCCL : FSDP_TRANSPORT_STAGING;
}

}  // namespace

json live_as_neighbours(const Options &options) {
  const uint32_t count = options.number("neighbours", 1), first = variable("RANK") * count;
  harness::Scenario scenario = scenario_from(options);
  scenario.ranks = variable("WORLD_SIZE") * count;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.model.flags = options.number("discard", 0) ? FSDP_MODEL_NO_PREFETCH : 0;
  scenario.context.device = FSDP_DEVICE_CUDA;
  scenario.context.device_transport = transport_of(options.text("gpus"));
  std::atomic<uint32_t> training{0};
  std::vector<json> results(count);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      results[i] = live_one(scenario, first + i, options.number("discard", 0) != 0, training);
      training = count;  // a rank that has ended waits for no other
    });
  while (training < count) harness::pause_ms(1);
  say({{"training", harness::now()}});
  for (std::thread &thread : threads) thread.join();
  return {{"status", results[0]["status"]}, {"neighbours", results}};
}

}  // namespace network
