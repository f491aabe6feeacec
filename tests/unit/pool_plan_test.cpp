// SPDX-License-Identifier: Apache-2.0
#include "memory/pool_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "base/error.h"

namespace fsdp::memory {
namespace {

using Requests = std::vector<PoolRequest>;

// Makes a forward pass over all layers and the backward pass in reverse, with one layer gathered ahead.
Requests sequential(uint32_t layers, uint64_t bytes) {
  Requests requests;
  for (uint64_t layer = 0; layer < layers; ++layer) {
    const uint64_t backward = 2 * layers - 1 - layer;
    requests.push_back({bytes, {{0, layer ? layer - 1 : 0, layer + 1}, {0, backward - 1, backward + 1}}});
  }
  return requests;
}

Requests random_requests(uint32_t seed, bool equal) {
  std::mt19937 random(seed);
  Requests requests(1 + random() % 60);
  for (PoolRequest &request : requests) {
    request.bytes = equal ? 4096 : random() % 10 == 0 ? 0 : 1 + random() % (1u << (random() % 20));
    request.track = seed % 3 == 0 ? random() % 2 : 0;
    for (uint32_t i = random() % 4; i-- > 0;) {
      const uint64_t begin = random() % 100;
      request.live.push_back({static_cast<uint32_t>(random() % 2), begin, begin + random() % 20});
    }
  }
  return requests;
}

// Makes a schedule as models have it: an embedding and a head beside layers of a few sizes, gathered up to three ahead.
Requests scheduled_requests(uint32_t seed) {
  std::mt19937 random(seed);
  const uint64_t layers = 2 + random() % 60, depth = random() % 4, period = 1 + random() % 4;
  std::vector<uint64_t> sizes;
  for (uint64_t i = 0; i < period; ++i) sizes.push_back(1000 + random() % 100000);
  Requests requests;
  for (uint64_t layer = 0; layer < layers; ++layer) {
    const uint64_t forward = layer, backward = 2 * layers - 1 - layer;
    const bool end = layer == 0 || layer + 1 == layers;
    requests.push_back({end ? random() % 400000 : sizes[layer % period],
                        {{0, forward - std::min(forward, depth), forward + 1},
                         {0, backward - std::min(backward, depth), backward + 1}}});
  }
  return requests;
}

bool is_live(const PoolRequest &request, uint32_t mode, uint64_t time) {
  return std::ranges::any_of(request.live,
                             [&](const Interval &i) { return i.mode == mode && i.begin <= time && time < i.end; });
}

// Computes the most bytes that are live at one time of one mode. Tracks advance independently, so their maxima may
// coincide. A peak begins where an interval begins.
uint64_t peak_of(const Requests &requests, uint64_t alignment) {
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> peaks;  // by mode and track
  for (const PoolRequest &at : requests)
    for (const Interval &interval : at.live) {
      uint64_t bytes = 0;
      for (const PoolRequest &other : requests)
        if (other.track == at.track && is_live(other, interval.mode, interval.begin))
          bytes += (other.bytes + alignment - 1) / alignment * alignment;
      uint64_t &peak = peaks[{interval.mode, at.track}];
      peak = std::max(peak, bytes);
    }
  std::map<uint32_t, uint64_t> of_modes;
  for (const auto &[key, bytes] : peaks) of_modes[key.first] += bytes;
  uint64_t most = 0;
  for (const auto &[mode, bytes] : of_modes) most = std::max(most, bytes);
  return most;
}

TEST(PoolPlan, KeepsItsPromisesOnRandomRequests) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    const Requests requests = random_requests(seed, seed % 4 == 0);
    const uint64_t alignment = uint64_t{1} << (seed % 13);
    const PoolPlan plan = plan_pool(requests, alignment);
    ASSERT_EQ(validate(plan, requests), "");
    ASSERT_EQ(plan.lower_bound_bytes, peak_of(requests, alignment));
    ASSERT_GE(plan.size_bytes, plan.lower_bound_bytes);
    ASSERT_EQ(plan.size_bytes % alignment, 0u);
    for (size_t r = 0; r < requests.size(); ++r) {
      ASSERT_EQ(plan.offsets[r] % alignment, 0u);
      ASSERT_EQ(plan.slots[r] == no_slot, requests[r].bytes == 0);
    }
    const PoolPlan again = plan_pool(requests, alignment);
    ASSERT_EQ(plan.offsets, again.offsets);
    ASSERT_EQ(plan.slots, again.slots);
  }
}

TEST(PoolPlan, StaysNearTheLowerBound) {
  double worst = 1, sum = 0;
  constexpr uint32_t count = 500;
  for (uint32_t seed = 0; seed < count; ++seed) {
    const Requests requests = scheduled_requests(seed);
    const PoolPlan plan = plan_pool(requests, 256);
    const uint64_t least = peak_of(requests, 256);
    const double ratio = least == 0 ? 1 : static_cast<double>(plan.size_bytes) / static_cast<double>(least);
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  RecordProperty("worst", std::to_string(worst));
  RecordProperty("mean", std::to_string(sum / count));
  EXPECT_LT(sum / count, 1.01);
  EXPECT_LT(worst, 1.15);
}

TEST(PoolPlan, NeedsTwoBuffersAtAnyDepth) {
  for (uint32_t layers : {2u, 3u, 4u, 12u, 81u, 1000u, 10000u}) {
    const Requests requests = sequential(layers, 1000);
    const PoolPlan plan = plan_pool(requests, 256);
    ASSERT_EQ(validate(plan, requests), "");
    EXPECT_EQ(plan.size_bytes, 2 * 1024u) << layers;
    EXPECT_EQ(plan.lower_bound_bytes, 2 * 1024u) << layers;
  }
}

TEST(PoolPlan, IsPinnedOnASmallSchedule) {
  const PoolPlan plan = plan_pool(sequential(4, 100), 64);
  EXPECT_EQ(plan.offsets, (std::vector<uint64_t>{0, 128, 0, 128}));
  EXPECT_EQ(plan.slots, (std::vector<uint32_t>{0, 1, 0, 1}));
}

TEST(PoolPlan, LargeBufferSharesItsBytesWithSeveralSmallOnes) {
  // The large interval is alone; later two small ones are live at once.
  const Requests requests{{1000, {{0, 0, 1}}}, {500, {{0, 1, 3}}}, {500, {{0, 2, 4}}}};
  const PoolPlan plan = plan_pool(requests, 1);
  ASSERT_EQ(validate(plan, requests), "");
  EXPECT_EQ(plan.size_bytes, 1000u);
}

TEST(PoolPlan, TakesTheUnionOfModes) {
  // 0 and 1 meet in mode 0 only, 1 and 2 meet in mode 1 only, and 0 and 2 never meet.
  const Requests requests{{8, {{0, 0, 2}}}, {8, {{0, 1, 3}, {1, 0, 2}}}, {8, {{1, 1, 3}}}};
  const PoolPlan plan = plan_pool(requests, 8);
  ASSERT_EQ(validate(plan, requests), "");
  EXPECT_EQ(plan.size_bytes, 16u);
  EXPECT_EQ(plan.offsets[0], plan.offsets[2]);
}

TEST(PoolPlan, KeepsTracksApart) {
  const Requests requests{{64, {{0, 0, 1}}, 0}, {64, {{0, 5, 6}}, 0}, {64, {{0, 9, 10}}, 1}, {64, {{0, 7, 8}}, 1}};
  const PoolPlan plan = plan_pool(requests, 64);
  ASSERT_EQ(validate(plan, requests), "");
  EXPECT_EQ(plan.size_bytes, 128u);
  EXPECT_EQ(plan.lower_bound_bytes, 128u);
  EXPECT_EQ(plan.offsets[0], plan.offsets[1]);
  EXPECT_EQ(plan.offsets[2], plan.offsets[3]);
  EXPECT_NE(plan.slots[0], plan.slots[2]);
}

TEST(PoolPlan, JoinsOverlappingIntervalsOfOneRequest) {
  const Requests requests{{64, {{0, 0, 5}, {0, 2, 9}, {0, 9, 12}, {0, 3, 3}}}, {64, {{0, 11, 13}}}};
  const PoolPlan plan = plan_pool(requests, 64);
  ASSERT_EQ(validate(plan, requests), "");
  EXPECT_EQ(plan.lower_bound_bytes, 128u);
}

TEST(PoolPlan, GivesEvenIdleRequestsAnAddress) {
  const Requests requests{{64, {}}, {32, {{0, 0, 1}}}, {0, {{0, 0, 1}}}};
  const PoolPlan plan = plan_pool(requests, 32);
  ASSERT_EQ(validate(plan, requests), "");
  EXPECT_EQ(plan.size_bytes, 64u);
  EXPECT_EQ(plan.lower_bound_bytes, 32u);
}

TEST(PoolPlan, OfNothingIsEmpty) {
  const PoolPlan plan = plan_pool({}, 4096);
  EXPECT_EQ(plan.size_bytes, 0u);
  EXPECT_EQ(plan.lower_bound_bytes, 0u);
}

TEST(PoolPlan, ManyBuffersLiveAtOnce) {
  Requests requests;
  for (uint64_t r = 0; r < 3000; ++r) requests.push_back({64 * (1 + r % 3), {{0, r, 6000 - r}}});
  const PoolPlan plan = plan_pool(requests, 64);
  EXPECT_EQ(validate(plan, requests), "");
  EXPECT_EQ(plan.size_bytes, plan.lower_bound_bytes);
}

TEST(PoolPlan, RejectsInvalidInput) {
  const Requests huge{{UINT64_MAX - 5, {{0, 0, 1}}}, {100, {{0, 0, 1}}}};
  EXPECT_THROW(plan_pool(huge, 1), Error);
  EXPECT_THROW(plan_pool(Requests{{UINT64_MAX - 5, {{0, 0, 1}}}}, 4096), Error);
  EXPECT_THROW(plan_pool(sequential(2, 1), 0), Error);
}

TEST(PoolPlan, ValidateNoticesWhatIsBroken) {
  const Requests requests = sequential(4, 64);
  const PoolPlan good = plan_pool(requests, 64);
  PoolPlan broken = good;
  broken.offsets[1] = broken.offsets[0];
  EXPECT_NE(validate(broken, requests), "");
  broken = good;
  broken.offsets[1] = good.size_bytes - 32;
  EXPECT_NE(validate(broken, requests), "");
  broken = good;
  broken.offsets[2] += 32;
  EXPECT_NE(validate(broken, requests), "");
  Requests apart = requests;
  apart[2].track = 1;
  EXPECT_NE(validate(good, apart), "");
}

}  // namespace
}  // namespace fsdp::memory
