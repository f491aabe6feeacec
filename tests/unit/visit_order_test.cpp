// SPDX-License-Identifier: Apache-2.0
#include "memory/visit_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "base/error.h"

namespace fsdp::memory {
namespace {

ScheduleSpec layers(uint32_t count, uint32_t depth = 1) {
  ScheduleSpec spec;
  spec.groups.assign(count, {.buffers = {{1024, 1024}}, .grad_bytes = {2048}});
  spec.prefetch_depth = depth;
  return spec;
}

bool live_at(const PoolRequest &request, uint32_t mode, uint64_t time) {
  return std::ranges::any_of(request.live,
                             [&](const Interval &i) { return i.mode == mode && i.begin <= time && time < i.end; });
}

uint32_t live_count(const std::vector<PoolRequest> &requests, uint32_t mode, uint64_t time) {
  return static_cast<uint32_t>(
      std::ranges::count_if(requests, [&](const PoolRequest &r) { return live_at(r, mode, time); }));
}

// Plays one pass as the engine does. A visit gathers its own group and those ahead. At its end it releases the group,
// unless one of the next visits is to the same group. Gathered groups must be live in the plan.
void play(const ScheduleSpec &spec, const VisitOrder &order, const std::vector<fsdp_visit> &visits,
          const std::vector<std::vector<uint32_t>> &prefetch, uint32_t mode) {
  const auto keys = [&](uint32_t i) {
    const auto [group, phase, piece] = visits[i];
    std::set<uint32_t> read;
    if (phase == FSDP_BACKWARD && !spec.groups[group].backward_weights) return read;
    for (uint32_t p = 0; p < spec.groups[group].piece_count; ++p)
      if (piece == 0 || piece == FSDP_PIECE(p)) read.insert(order.key(group, p, gather_slot(spec, group, phase)));
    return read;
  };
  const bool whole = std::ranges::none_of(spec.groups, [](const auto &g) { return g.buffers.size() > 1; });
  const uint32_t residents =
      static_cast<uint32_t>(std::ranges::count_if(spec.groups, [](const auto &g) { return g.resident; }));
  std::set<uint32_t> gathered;
  ASSERT_EQ(prefetch.size(), visits.size());
  for (uint32_t i = 0; i < visits.size(); ++i) {
    gathered.merge(keys(i));
    uint32_t before = i;
    for (uint32_t next : prefetch[i]) {
      ASSERT_GT(next, before);  // nearest first
      before = next;
      gathered.merge(keys(next));
    }
    for (uint32_t k : gathered) ASSERT_TRUE(live_at(order.gathered[k], mode, i)) << "key " << k << " at " << i;
    if (spec.kind != FSDP_SCHEDULE_INTERLEAVED && whole) {
      ASSERT_LE(live_count(order.gathered, mode, i), spec.prefetch_depth + 1 + residents) << "at " << i;
    }
    const bool resident = mode == 0 && visits[i].phase == FSDP_FORWARD && spec.groups[visits[i].group_index].resident;
    for (const uint32_t key : keys(i)) {
      bool again = resident;
      for (uint32_t next = i + 1; next < visits.size() && next <= i + spec.prefetch_depth; ++next)
        again = again || keys(next).contains(key);
      if (!again) gathered.erase(key);
    }
  }
}

void check(const ScheduleSpec &spec) {
  const VisitOrder order = build_visit_order(spec);
  ASSERT_NO_FATAL_FAILURE(play(spec, order, order.train, order.train_prefetch, 0));
  ASSERT_NO_FATAL_FAILURE(play(spec, order, order.eval, order.eval_prefetch, 1));
  for (const auto *requests : {&order.gathered, &order.grads})
    ASSERT_EQ(validate(plan_pool(*requests, 256), *requests), "");
}

TEST(VisitOrder, SequentialGoesForwardAndBack) {
  const VisitOrder order = build_visit_order(layers(3));
  const std::vector<std::pair<uint32_t, fsdp_phase>> expected{{0, FSDP_FORWARD},  {1, FSDP_FORWARD},
                                                              {2, FSDP_FORWARD},  {2, FSDP_BACKWARD},
                                                              {1, FSDP_BACKWARD}, {0, FSDP_BACKWARD}};
  ASSERT_EQ(order.train.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(order.train[i].group_index, expected[i].first);
    EXPECT_EQ(order.train[i].phase, expected[i].second);
  }
  ASSERT_EQ(order.eval.size(), 3u);
  EXPECT_EQ(order.eval[1].phase, FSDP_EVAL);
  EXPECT_EQ(order.train_prefetch, (std::vector<std::vector<uint32_t>>{{1}, {2}, {3}, {4}, {5}, {}}));
  EXPECT_EQ(order.eval_prefetch, (std::vector<std::vector<uint32_t>>{{1}, {2}, {}}));
}

TEST(VisitOrder, SequentialNeedsDepthPlusOneBuffers) {
  for (uint32_t count : {1u, 2u, 5u, 80u})
    for (uint32_t depth : {0u, 1u, 2u, 3u, 7u}) {
      SCOPED_TRACE(std::to_string(count) + " groups, depth " + std::to_string(depth));
      ASSERT_NO_FATAL_FAILURE(check(layers(count, depth)));
      const VisitOrder order = build_visit_order(layers(count, depth));
      const PoolPlan plan = plan_pool(order.gathered, 256);
      EXPECT_EQ(plan.lower_bound_bytes, 1024u * std::min(count, depth + 1));
      EXPECT_EQ(plan.size_bytes, plan.lower_bound_bytes);
    }
}

TEST(VisitOrder, AtMostPendingGradientBuffers) {
  for (uint32_t count : {1u, 2u, 9u, 80u})
    for (uint32_t pending : {1u, 2u, 3u}) {
      ScheduleSpec spec = layers(count);
      spec.pending_grads = pending;
      const PoolPlan plan = plan_pool(build_visit_order(spec).grads, 256);
      EXPECT_EQ(plan.lower_bound_bytes, 2048u * std::min(count, pending));
      EXPECT_EQ(plan.size_bytes, plan.lower_bound_bytes);
    }
}

TEST(VisitOrder, FrozenGroupsTakeNoGradientTime) {
  ScheduleSpec spec = layers(9);
  for (uint32_t g = 1; g < 9; g += 2) {
    spec.groups[g].trainable = false;
    spec.groups[g].grad_bytes = {0};
  }
  const VisitOrder order = build_visit_order(spec);
  for (uint32_t g = 0; g < 9; ++g) EXPECT_EQ(order.grads[g].live.empty(), g % 2 == 1);
  EXPECT_EQ(plan_pool(order.grads, 256).size_bytes, 2 * 2048u);
  for (uint64_t time = 0; time < 9; ++time) EXPECT_LE(live_count(order.grads, 0, time), 2u);
}

TEST(VisitOrder, ByteLimitBoundsWhatIsAhead) {
  ScheduleSpec spec = layers(6, 3);
  spec.prefetch_bytes = 2048;
  const VisitOrder order = build_visit_order(spec);
  EXPECT_EQ(order.train_prefetch[0], (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(plan_pool(order.gathered, 256).size_bytes, 3 * 1024u);
  ASSERT_NO_FATAL_FAILURE(check(spec));
  spec.prefetch_bytes = 1023;
  EXPECT_EQ(build_visit_order(spec).train_prefetch[0], (std::vector<uint32_t>{}));
}

TEST(VisitOrder, ByteLimitLetsNothingOvertake) {
  ScheduleSpec spec = layers(4, 3);
  spec.groups[1].buffers[0].prefetch_bytes = 5000;
  spec.prefetch_bytes = 4096;
  const VisitOrder order = build_visit_order(spec);
  EXPECT_EQ(order.train_prefetch[0], (std::vector<uint32_t>{}));
  EXPECT_EQ(order.train_prefetch[1], (std::vector<uint32_t>{2, 3}));
}

TEST(VisitOrder, ByteLimitDoesNotTouchKeptWeights) {
  ScheduleSpec spec = layers(3);
  spec.prefetch_bytes = 1;
  // At the turn the last group stays gathered for its backward visit.
  EXPECT_EQ(build_visit_order(spec).train_prefetch[2], (std::vector<uint32_t>{3}));
  ASSERT_NO_FATAL_FAILURE(check(spec));
}

TEST(VisitOrder, MappedGroupsNeedNoBuffer) {
  ScheduleSpec spec = layers(5);
  for (ScheduledGroup &group : spec.groups) group.buffers[0].bytes = 0;
  EXPECT_EQ(plan_pool(build_visit_order(spec).gathered, 256).size_bytes, 0u);
}

TEST(VisitOrder, ResidentStaysFromForwardToBackward) {
  ScheduleSpec spec = layers(6);
  spec.groups[0].resident = true;
  const VisitOrder order = build_visit_order(spec);
  for (uint64_t time = 0; time < order.train.size(); ++time) EXPECT_TRUE(live_at(order.gathered[0], 0, time));
  EXPECT_FALSE(live_at(order.gathered[0], 1, 2));
  EXPECT_EQ(plan_pool(order.gathered, 256).size_bytes, 3 * 1024u);
  ASSERT_NO_FATAL_FAILURE(check(spec));
  // Its backward visit gathers nothing, and takes no place in the prefetch window of others.
  EXPECT_EQ(order.train_prefetch[10], (std::vector<uint32_t>{}));
}

TEST(VisitOrder, InterleavedKeepsDirectionsApart) {
  for (uint32_t depth : {0u, 1u, 2u}) {
    ScheduleSpec spec = layers(8, depth);
    spec.kind = FSDP_SCHEDULE_INTERLEAVED;
    ASSERT_NO_FATAL_FAILURE(check(spec));
    const VisitOrder order = build_visit_order(spec);
    ASSERT_EQ(order.gathered.size(), 16u);
    const PoolPlan plan = plan_pool(order.gathered, 256);
    EXPECT_EQ(plan.size_bytes, 2 * (depth + 1) * 1024u);
    EXPECT_EQ(plan.lower_bound_bytes, plan.size_bytes);
    for (uint32_t f = 0; f < 8; ++f)
      for (uint32_t b = 0; b < 8; ++b) {
        const uint64_t forward = plan.offsets[2 * f + gather_slot(spec, f, FSDP_FORWARD)];
        const uint64_t backward = plan.offsets[2 * b + gather_slot(spec, b, FSDP_BACKWARD)];
        EXPECT_TRUE(forward + 1024 <= backward || backward + 1024 <= forward);
      }
    // No prefetch crosses from one half into the other.
    for (uint32_t i = 0; i < 8; ++i)
      for (uint32_t next : order.train_prefetch[i]) EXPECT_LT(next, 8u);
  }
}

TEST(VisitOrder, InterleavedResidentNeverSharesItsForwardBuffer) {
  ScheduleSpec spec = layers(5);
  spec.kind = FSDP_SCHEDULE_INTERLEAVED;
  spec.groups[2].resident = true;
  const VisitOrder order = build_visit_order(spec);
  const PoolPlan plan = plan_pool(order.gathered, 256);
  for (uint32_t key = 0; key < 10; ++key)
    if (key != 4) {
      EXPECT_NE(plan.offsets[key], plan.offsets[4]);
    }
}

ScheduleSpec tied_embedding() {
  ScheduleSpec spec = layers(4);
  spec.kind = FSDP_SCHEDULE_VISITS;
  spec.visits = {{0, FSDP_FORWARD, 0},  {1, FSDP_FORWARD, 0},  {2, FSDP_FORWARD, 0},  {3, FSDP_FORWARD, 0},
                 {0, FSDP_FORWARD, 0},  {0, FSDP_BACKWARD, 0}, {3, FSDP_BACKWARD, 0}, {2, FSDP_BACKWARD, 0},
                 {1, FSDP_BACKWARD, 0}, {0, FSDP_BACKWARD, 0}};
  return spec;
}

TEST(VisitOrder, VisitsAGroupTwice) {
  const ScheduleSpec spec = tied_embedding();
  ASSERT_NO_FATAL_FAILURE(check(spec));
  const VisitOrder order = build_visit_order(spec);
  EXPECT_EQ(order.eval.size(), 5u);
  EXPECT_EQ(order.train_prefetch[3], (std::vector<uint32_t>{4}));
  EXPECT_FALSE(live_at(order.gathered[0], 0, 2));
  EXPECT_EQ(plan_pool(order.gathered, 256).lower_bound_bytes, 2 * 1024u);
  // Its gradient is open from the first backward visit until it is drained after the last.
  for (uint64_t time = 0; time < 6; ++time) EXPECT_TRUE(live_at(order.grads[0], 0, time)) << time;
}

// Parts take turns, the last one first. Parts of a group that is open for several visits do not.
TEST(VisitOrder, PartsHaveTurnsOfTheirOwn) {
  ScheduleSpec spec = tied_embedding();
  for (ScheduledGroup &group : spec.groups) group.grad_bytes = {1024, 0, 2048};
  const VisitOrder order = build_visit_order(spec);
  ASSERT_EQ(order.grads.size(), 3 * spec.groups.size());
  EXPECT_EQ(order.open_grads, 2u);
  for (uint64_t time = 0; time < 12; ++time)
    for (const size_t part : {0u, 2u})
      EXPECT_EQ(live_at(order.grads[part], 0, time), time < (part ? 10u : 11u)) << "part " << part << " at " << time;
  EXPECT_TRUE(order.grads[1].live.empty());
  // Group 3 comes first after it: its last part, then its first one. Each stays open until two more are opened.
  for (uint64_t time = 0; time < 8; ++time) {
    EXPECT_EQ(live_at(order.grads[11], 0, time), time == 2 || time == 3) << time;
    EXPECT_EQ(live_at(order.grads[9], 0, time), time == 3 || time == 4) << time;
  }
}

// BACKWARD has its own buffer, so no group is kept from its forward visit to its backward visit, or live in between.
// Recomputed groups inside a BACKWARD visit are live only then.
TEST(VisitOrder, GroupsByPhaseHaveTwoBuffers) {
  for (const bool recompute : {false, true}) {
    ScheduleSpec spec = layers(3);
    for (ScheduledGroup &group : spec.groups) group.by_phase = true;
    spec.recompute = recompute;
    const VisitOrder order = build_visit_order(spec);
    ASSERT_EQ(order.slots, 2u);
    ASSERT_EQ(order.gathered.size(), 6u);
    const PoolRequest &rows = order.gathered[2 * 2], &columns = order.gathered[2 * 2 + 1];
    EXPECT_TRUE(live_at(rows, 0, 1) && live_at(rows, 0, 2));        // gathered ahead, and in its forward visit
    EXPECT_TRUE(live_at(columns, 0, 2) && live_at(columns, 0, 3));  // gathered ahead, and in its backward visit
    EXPECT_FALSE(live_at(columns, 0, 1));
    EXPECT_EQ(live_at(rows, 0, 3), recompute);
    EXPECT_FALSE(live_at(rows, 0, 4));
    EXPECT_EQ(order.train_prefetch[2], (std::vector<uint32_t>{3}));
    EXPECT_EQ(plan_pool(order.gathered, 256).lower_bound_bytes, (recompute ? 3 : 2) * 1024u);
  }
  // A recompute that is visited is gathered ahead, and the COLUMN planes behind it are gathered in its visit.
  ScheduleSpec spec = layers(2);
  spec.groups[0].by_phase = spec.groups[1].by_phase = true;
  spec.kind = FSDP_SCHEDULE_VISITS;
  spec.visits = {{0, FSDP_FORWARD, 0},  {1, FSDP_FORWARD, 0},   {1, FSDP_RECOMPUTE, 0},
                 {1, FSDP_BACKWARD, 0}, {0, FSDP_RECOMPUTE, 0}, {0, FSDP_BACKWARD, 0}};
  const VisitOrder order = build_visit_order(spec);
  EXPECT_EQ(order.train_prefetch[3], (std::vector<uint32_t>{4}));
  EXPECT_EQ(order.train_prefetch[4], (std::vector<uint32_t>{5}));
  EXPECT_TRUE(live_at(order.gathered[0], 0, 3) && live_at(order.gathered[0], 0, 4));
  EXPECT_FALSE(live_at(order.gathered[0], 0, 5));
  EXPECT_EQ(order.eval.size(), 2u);
}

TEST(VisitOrder, KeepsItsPromisesOnRandomVisits) {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    ScheduleSpec spec = layers(1 + random() % 12, random() % 5);
    spec.kind = static_cast<fsdp_schedule_kind>(1 + random() % 3);
    spec.pending_grads = 1 + random() % 3;
    if (random() % 3 == 0) spec.prefetch_bytes = random() % 5000;
    for (ScheduledGroup &group : spec.groups) {
      const uint64_t bytes = 1 + random() % 5000;
      group.buffers = {{bytes, bytes}};
      group.grad_bytes = {random() % 4 ? 2 * bytes : 0};
      group.resident = random() % 5 == 0;
      group.by_phase = !group.resident && random() % 3 == 0;
      group.backward_weights = group.resident || random() % 5 != 0;
      group.piece_count = 1 + random() % 3;
      if (spec.kind == FSDP_SCHEDULE_VISITS && random() % 2)
        group.buffers.resize(group.piece_count, {bytes / 2, bytes});
    }
    const auto visit = [&](uint32_t group, fsdp_phase phase) {
      const bool whole = random() % 3 == 0;
      for (uint32_t p = 0; p < spec.groups[group].piece_count; ++p)
        if (p == 0 || !whole) spec.visits.push_back({group, phase, whole ? 0 : FSDP_PIECE(p)});
    };
    const auto any = [&] { return static_cast<uint32_t>(random() % spec.groups.size()); };
    for (uint32_t g = 0; g < spec.groups.size(); ++g) visit(g, FSDP_FORWARD);
    const auto forward = static_cast<ptrdiff_t>(spec.visits.size());
    for (uint32_t i = random() % 4; i-- > 0;) visit(any(), FSDP_FORWARD);
    for (uint32_t g = 0; g < spec.groups.size(); ++g) visit(g, FSDP_BACKWARD);
    for (uint32_t i = random() % 4; i-- > 0;) visit(any(), random() % 2 ? FSDP_BACKWARD + 0 : FSDP_RECOMPUTE + 0);
    std::shuffle(spec.visits.begin() + forward, spec.visits.end(), random);
    ASSERT_NO_FATAL_FAILURE(check(spec));
  }
}

// Two layers, each of a large and a small piece. A piece has a place in the pool from the visit before its own visit to
// the end of its own visit.
TEST(VisitOrder, PiecesThatVisitsNameLiveForTheirOwnVisits) {
  ScheduleSpec spec = layers(2);
  spec.kind = FSDP_SCHEDULE_VISITS;
  for (ScheduledGroup &group : spec.groups) group.piece_count = 2, group.buffers = {{4096, 4096}, {1024, 1024}};
  for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD})
    for (const uint32_t g : {0u, 1u})
      for (const uint32_t p : {0u, 1u}) spec.visits.push_back({g, phase, FSDP_PIECE(p)});
  const VisitOrder order = build_visit_order(spec);
  ASSERT_EQ(order.gathered.size(), 4u);
  EXPECT_EQ(order.key(1, 1, 0), 3u);
  for (uint32_t time = 1; time < 8; ++time)
    for (uint32_t key = 0; key < 4; ++key)
      EXPECT_EQ(live_at(order.gathered[key], 0, time), key == time % 4 || (time < 7 && key == (time + 1) % 4))
          << key << " at " << time;
  EXPECT_EQ(plan_pool(order.gathered, 512).size_bytes, 4096u + 1024);  // whole groups would take 10240
  EXPECT_EQ(order.open_grads, 0u);  // a group's two BACKWARD visits open its gradients once
}

TEST(VisitOrder, AGroupWithoutWeightsInBackwardLivesInForwardOnly) {
  ScheduleSpec spec = layers(3);
  spec.groups[0].backward_weights = false;
  const VisitOrder order = build_visit_order(spec);
  for (uint32_t time = 0; time < 6; ++time) EXPECT_EQ(live_at(order.gathered[0], 0, time), time == 0) << time;
  EXPECT_EQ(order.train_prefetch, (std::vector<std::vector<uint32_t>>{{1}, {2}, {3}, {4}, {}, {}}));
  spec.kind = FSDP_SCHEDULE_INTERLEAVED;
  const VisitOrder both = build_visit_order(spec);
  EXPECT_EQ(both.gathered[both.key(0, 0, 1)].bytes, 0u);
  EXPECT_EQ(both.gathered[both.key(1, 0, 1)].bytes, 1024u);
}

TEST(VisitOrder, OfNothingIsEmpty) {
  const VisitOrder order = build_visit_order({});
  EXPECT_TRUE(order.train.empty());
  EXPECT_TRUE(order.gathered.empty());
}

std::string error_of(const ScheduleSpec &spec) {
  try {
    build_visit_order(spec);
    return "";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT);
    return error.message;
  }
}

TEST(VisitOrder, RejectsInvalidInput) {
  ScheduleSpec spec = tied_embedding();
  EXPECT_EQ(error_of(spec), "");
  spec.visits[2].group_index = 4;
  EXPECT_EQ(error_of(spec), "visit 2: group 4 is outside [0, 4)");
  spec = tied_embedding();
  spec.visits[2].piece = FSDP_PIECE(1);
  EXPECT_EQ(error_of(spec), "visit 2: it names piece 1 of group 2, which has one piece");
  spec.groups[2].piece_count = 3;
  EXPECT_EQ(error_of(spec), "");
  spec.visits[2].piece = FSDP_PIECE(3);
  EXPECT_EQ(error_of(spec), "visit 2: it names piece 3 of group 2, which has the pieces 0 to 2");
  spec = tied_embedding();
  spec.visits[2].phase = FSDP_EVAL;
  EXPECT_EQ(error_of(spec), "visit 2: phase 4 is none of FORWARD, BACKWARD and RECOMPUTE");
  spec.visits[2].phase = FSDP_RECOMPUTE;
  EXPECT_EQ(error_of(spec), "visit 2: RECOMPUTE of group 2 before its first FORWARD");
  spec = tied_embedding();
  spec.visits.insert(spec.visits.begin() + 6, {3, FSDP_RECOMPUTE, 0});
  EXPECT_EQ(error_of(spec), "");
  spec = tied_embedding();
  spec.visits.erase(spec.visits.begin() + 8);
  EXPECT_EQ(error_of(spec), "group 1 is trainable, but has no BACKWARD visit");
  spec.groups[1].trainable = false;
  EXPECT_EQ(error_of(spec), "");
  spec = tied_embedding();
  std::swap(spec.visits[3], spec.visits[6]);
  EXPECT_EQ(error_of(spec), "visit 3: BACKWARD of group 3 before its first FORWARD");
  spec = layers(2);
  spec.kind = 9;
  EXPECT_EQ(error_of(spec), "unknown schedule 9");
}

}  // namespace
}  // namespace fsdp::memory
