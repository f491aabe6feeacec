// SPDX-License-Identifier: Apache-2.0
// Debug mode: from the return of fsdp_reshard on, the released view shows poison or cannot be read, on any number of
// ranks and in every strategy. Debug mode changes no bit of what a legal program computes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>

#include "harness.h"

using namespace harness;

namespace {

enum class Kind { flat, hsdp, hfsdp, hosts };
constexpr Kind kinds[] = {Kind::flat, Kind::hsdp, Kind::hfsdp, Kind::hosts};

#if defined(__SANITIZE_THREAD__)
#define NEEDS_PROTECTION() \
  GTEST_SKIP() << "under ThreadSanitizer ranks share one view of the memory, which is not protected"
#else
#define NEEDS_PROTECTION() static_cast<void>(0)
#endif

void set_kind(Scenario &setup, Kind kind) {
  if (kind == Kind::hosts) setup.context.ranks_per_host = setup.ranks / 2;
  if (kind != Kind::hsdp && kind != Kind::hfsdp) return;
  setup.mesh.replicate_size = 2;
  setup.mesh.shard_size = setup.ranks / 2;
  if (kind == Kind::hfsdp) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
}

// Returns whether the byte can be read. A system call that reads it reports this without a fault.
bool readable(const void *data) {
  static thread_local int ends[2] = {-1, -1};
  if (ends[0] < 0 && ::pipe(ends) != 0) throw std::runtime_error("pipe");
  const bool well = ::write(ends[1], data, 1) == 1;
  char byte = 0;
  if (well && ::read(ends[0], &byte, 1) != 1) throw std::runtime_error("read");
  return well;
}

fsdp_tensor view_of(Rank &rank, size_t group, fsdp_phase phase) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_param(rank.groups[group], 0, phase, &view));
  return view;
}

// A program that uses a view after its release must see nothing, or only NaN. Returns an error text, empty if that
// holds.
std::string find_seen(const fsdp_tensor &view) {
  if (!readable(view.data)) return {};
  const auto *data = static_cast<const volatile float *>(view.data);
  for (uint64_t i = 0; i < view.element_count; ++i)
    if (const float seen = data[i]; !std::isnan(seen))
      return "element " + std::to_string(i) + " is " + std::to_string(seen);
  return {};
}

// Checks every group, right after its reshard and while the next groups are used, in every phase.
void expect_released(const Scenario &setup, const std::string &what) {
  SCOPED_TRACE(what);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const size_t count = rank.groups.size();
    const auto visit = [&](size_t g, fsdp_phase phase) {
      FSDP(fsdp_unshard(rank.groups[g], phase, 0, nullptr));
      const fsdp_tensor view = view_of(rank, g, phase);
      REQUIRE(*static_cast<const volatile float *>(view.data) == initial_weight(rank.setup.ordinal(g, 0), 0));
      FSDP(fsdp_reshard(rank.groups[g], phase, 0, nullptr));
      const std::string seen = find_seen(view);
      if (!seen.empty()) throw std::runtime_error(what + ": group " + std::to_string(g) + " after reshard: " + seen);
      return view;
    };
    for (int round = 0; round < (is_sanitized() ? 4 : 20); ++round) {
      std::vector<fsdp_tensor> old;
      for (size_t g = 0; g < count; ++g) old.push_back(visit(g, FSDP_FORWARD));
      for (size_t g = count; g-- > 0;) old.push_back(visit(g, FSDP_BACKWARD));
      for (size_t g = 0; g < count; ++g) old.push_back(visit(g, FSDP_EVAL));
      for (size_t g = 0; g < count; ++g) {
        FSDP(fsdp_prefetch(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        for (const fsdp_tensor &view : old) REQUIRE(find_seen(view).empty());
      }
      for (size_t g = 0; g < count; ++g) {  // each while another group is held
        FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        const auto *own = view_of(rank, g, FSDP_FORWARD).data;
        for (const fsdp_tensor &view : old)
          if (view.data != own) REQUIRE(find_seen(view).empty());
        FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
      }
    }
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Debug, AReleasedViewIsGoneWhenReshardReturns) {
  NEEDS_PROTECTION();
  for (const fsdp_unshard_mode mode : {fsdp_unshard_mode{0}, fsdp_unshard_mode{FSDP_UNSHARD_MAPPED}})
    for (const uint32_t ranks : {1u, 2u, 3u})
      expect_released(debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode),
                      "mode " + std::to_string(mode) + ", ranks " + std::to_string(ranks));
}

TEST(Debug, AReleasedViewIsGoneWithADeepPrefetchAndResidents) {
  NEEDS_PROTECTION();
  Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.model.prefetch_depth = 3;
  expect_released(setup, "prefetch depth 3");
  setup.groups[0].options.flags = FSDP_GROUP_RESIDENT;
  expect_released(setup, "resident");
}

TEST(Debug, AReleasedViewIsGoneInMeshesAndSchedules) {
  NEEDS_PROTECTION();
  for (const Kind kind : kinds)
    for (const uint32_t ranks : {2u, 4u})
      for (const fsdp_unshard_mode mode : {fsdp_unshard_mode{0}, fsdp_unshard_mode{FSDP_UNSHARD_MAPPED}}) {
        Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
        set_kind(setup, kind);
        expect_released(setup, "kind " + std::to_string(static_cast<int>(kind)) + ", ranks " + std::to_string(ranks));
      }
  Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.schedule = FSDP_SCHEDULE_INTERLEAVED;
  expect_released(setup, "interleaved");
}

// A view from FORWARD that is used in BACKWARD, while the group is unsharded again: legal, at the same address.
TEST(Debug, AForwardViewServesInBackward) {
  for (const fsdp_unshard_mode mode : {fsdp_unshard_mode{0}, fsdp_unshard_mode{FSDP_UNSHARD_MAPPED}}) {
    const Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
      const fsdp_tensor view = view_of(rank, 0, FSDP_FORWARD);
      FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr));
      REQUIRE(view_of(rank, 0, FSDP_BACKWARD).data == view.data);
      REQUIRE(*static_cast<const volatile float *>(view.data) == initial_weight(0, 0));
      FSDP(fsdp_reshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr));
      FSDP(fsdp_discard_step(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

// Weights that the strategy keeps whole may be read at any time outside of the update window, and not inside.
TEST(Debug, WholeWeightsCannotBeReadInTheUpdateWindow) {
  NEEDS_PROTECTION();
  Sample sample(5);
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS})
    for (const Kind kind : kinds)
      for (const uint32_t ranks : {1u, 2u, 4u})
        for (const fsdp_unshard_mode mode : {fsdp_unshard_mode{0}, fsdp_unshard_mode{FSDP_UNSHARD_MAPPED}})
          for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
            if ((kind != Kind::flat && ranks == 1) || !sample.takes_next()) continue;
            Scenario setup = debug_scenario(strategy, ranks, mode);
            set_kind(setup, kind);
            setup.set_dtype(dtype);
            SCOPED_TRACE("strategy " + std::to_string(strategy) + ", kind " + std::to_string(static_cast<int>(kind)) +
                         ", ranks " + std::to_string(ranks) + ", mode " + std::to_string(mode) + ", dtype " +
                         std::to_string(dtype));
            run_threads(setup, [&](uint32_t, fsdp_context *context) {
              Rank rank(context, setup);
              rank.load();
              std::vector<const void *> views;
              for (size_t g = 0; g < rank.groups.size(); ++g) views.push_back(view_of(rank, g, FSDP_FORWARD).data);
              const auto all = [&](bool expected) {
                for (const void *view : views) REQUIRE(readable(view) == expected);
              };
              all(true);
              forward(rank, nullptr);
              backward(rank, 0, 0, nullptr);
              all(true);
              FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
              all(false);
              FSDP(fsdp_discard_step(rank.model, nullptr));
              all(true);
              forward(rank, nullptr);
              backward(rank, 0, 0, nullptr);
              FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
              all(false);
              FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
              all(true);
              FSDP(fsdp_begin_update(rank.model, nullptr));
              all(false);
              FSDP(fsdp_publish_weights(rank.model, nullptr));
              all(true);
              FSDP(fsdp_close_context(context));
            });
          }
}

// Returns whether the byte can be written. The byte keeps its value.
bool writable(void *data) {
  static thread_local int ends[2] = {-1, -1};
  if (ends[0] < 0 && ::pipe(ends) != 0) throw std::runtime_error("pipe");
  char byte = 0;
  if (!readable(data)) return false;
  byte = *static_cast<volatile char *>(data);
  if (::write(ends[1], &byte, 1) != 1) throw std::runtime_error("write");
  if (::read(ends[0], data, 1) == 1) return true;
  if (::read(ends[0], &byte, 1) != 1) throw std::runtime_error("read");
  return false;
}

struct LentGrad {
  void *first, *last;
};

LentGrad lend(Rank &rank, size_t group, size_t param) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[group], param, 0, nullptr, &grad, &accumulate));
  auto *const bytes = static_cast<char *>(grad.data);
  return {bytes, bytes + grad.element_count * fsdp_get_dtype_size(grad.dtype) - 1};
}

// One backward pass. Without `keeps` a gradient can be written only from its acquire to its reduce; with it the buffer
// stays with the caller, and can be written until the last reduce.
std::vector<LentGrad> expect_lending(Rank &rank, bool last, bool keeps) {
  std::vector<LentGrad> earlier_groups;
  for (size_t g = rank.groups.size(); g-- > 0;) {
    std::vector<LentGrad> this_group;
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) this_group.push_back(lend(rank, g, p));
    for (const LentGrad &grad : this_group) REQUIRE(writable(grad.first) && writable(grad.last));
    if (last || !keeps)
      for (const LentGrad &grad : earlier_groups) REQUIRE(!writable(grad.first) && !writable(grad.last));
    for (const LentGrad &grad : this_group)
      std::memset(grad.first, 0, static_cast<char *>(grad.last) - static_cast<char *>(grad.first) + 1);
    FSDP(fsdp_reduce_grad(rank.groups[g], last ? FSDP_LAST : 0, nullptr));
    if (last || !keeps)
      for (const LentGrad &grad : this_group) REQUIRE(!writable(grad.first) && !writable(grad.last));
    earlier_groups.insert(earlier_groups.end(), this_group.begin(), this_group.end());
  }
  return earlier_groups;
}

// A gradient cannot be written from fsdp_reduce_grad on until its buffer is lent again, whichever group uses the buffer
// meanwhile.
TEST(Debug, AGradientCannotBeWrittenAfterItsReduce) {
  NEEDS_PROTECTION();
  Sample sample(3);
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST})
      for (const Kind kind : kinds)
        for (const uint32_t ranks : {1u, 2u, 4u}) {
          if ((kind != Kind::flat && ranks == 1) ||
              (strategy == FSDP_STRATEGY_OPTIM && policy == FSDP_REDUCE_POLICY_EACH) || !sample.takes_next())
            continue;
          Scenario setup = debug_scenario(strategy, ranks);
          set_kind(setup, kind);
          setup.model.reduce_policy = policy;
          SCOPED_TRACE("strategy " + std::to_string(strategy) + ", policy " + std::to_string(policy) + ", kind " +
                       std::to_string(static_cast<int>(kind)) + ", ranks " + std::to_string(ranks));
          run_threads(setup, [&](uint32_t, fsdp_context *context) {
            Rank rank(context, setup);
            rank.load();
            const bool keeps = policy == FSDP_REDUCE_POLICY_LAST;
            const auto gone = [](const std::vector<LentGrad> &grads) {
              for (const LentGrad &grad : grads) REQUIRE(!readable(grad.first) && !readable(grad.last));
            };
            for (int step = 0; step < 3; ++step) {
              expect_lending(rank, false, keeps);
              const auto old = expect_lending(rank, true, keeps);
              FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
              for (const LentGrad &grad : old) REQUIRE(!writable(grad.first));
              if (!keeps) gone(old);  // others may be the main grads
              if (step == 1)
                FSDP(fsdp_discard_step(rank.model, nullptr));
              else
                FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
              gone(old);
            }
            // A gradient is discarded while it is lent, and lent again.
            const LentGrad lent = lend(rank, rank.groups.size() - 1, 0);
            REQUIRE(writable(lent.first));
            FSDP(fsdp_discard_step(rank.model, nullptr));
            gone({lent});
            clean_step(rank, 0);
            FSDP(fsdp_close_context(context));
          });
        }
}

// The parts are completed one by one, while the rest of the group is written.
TEST(Debug, ACompletedPartCannotBeWritten) {
  NEEDS_PROTECTION();
  for (const uint32_t ranks : {1u, 2u}) {
    Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = {{"layer", {{"a", {64, 32}}, {"b", {64, 32}}, {"bias", {64}}, {"c", {64, 32}}}}};
    setup.model.max_pending_bytes = 20480;
    setup.complete = true;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      const auto complete = [&](uint64_t param) { FSDP(fsdp_complete_grad(rank.groups[0], param, 0, nullptr)); };
      const LentGrad c = lend(rank, 0, 3), bias = lend(rank, 0, 2);
      complete(3);
      // Both are in one part, which stays open for the bias.
      REQUIRE(writable(c.first) && writable(bias.first));
      complete(2);
      REQUIRE(!writable(c.first) && !writable(bias.last));
      const LentGrad b = lend(rank, 0, 1);
      REQUIRE(writable(b.first) && !writable(c.first));
      complete(1);
      const LentGrad a = lend(rank, 0, 0);
      REQUIRE(!writable(b.last) && writable(a.last) && !readable(c.first));
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      REQUIRE(!writable(a.first));
      FSDP(fsdp_discard_step(rank.model, nullptr));
      for (const LentGrad &grad : {a, b, bias, c}) REQUIRE(!readable(grad.first));
      clean_step(rank, 0);
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(DebugDeathTest, ALateWriteIntoAGradientFaults) {
  NEEDS_PROTECTION();
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
        run_threads(setup, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          const auto old = expect_lending(rank, true, false);
          ::signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would end the process in another way
          *static_cast<volatile char *>(old.front().first) = 1;
        });
        ::_exit(0);
      },
      testing::KilledBySignal(SIGSEGV), "");
}

// Debug mode changes no bit and takes the planned memory, for every strategy, mesh and way of gathering.
TEST(Debug, ChangesNoBitAndIsPlanned) {
  Sample sample(5);
  for (const fsdp_strategy strategy : strategies)
    for (const Kind kind : kinds)
      for (const uint32_t ranks : {1u, 2u, 4u})
        for (const fsdp_unshard_mode mode :
             {fsdp_unshard_mode{0}, fsdp_unshard_mode{FSDP_UNSHARD_MAPPED}, fsdp_unshard_mode{FSDP_UNSHARD_COPIED}}) {
          if ((kind != Kind::flat && ranks == 1) || !sample.takes_next()) continue;
          Scenario setup = scenario_of(strategy, ranks, mode);
          set_kind(setup, kind);
          setup.microbatches = 3;
          setup.put = mode == FSDP_UNSHARD_COPIED;
          setup.recompute = setup.eval = true;
          setup.clip = 0.5;
          setup.groups[1].params[0].dtype = FSDP_BFLOAT16;
          if (kind == Kind::flat && strategy == FSDP_STRATEGY_OPTIM_GRADS)
            setup.model.reduce_policy = FSDP_REDUCE_POLICY_LAST;
          SCOPED_TRACE("strategy " + std::to_string(strategy) + ", kind " + std::to_string(static_cast<int>(kind)) +
                       ", ranks " + std::to_string(ranks) + ", mode " + std::to_string(mode));
          const auto plain = train_threads(setup);
          setup.context.flags = FSDP_CONTEXT_DEBUG | (mode ? 0 : FSDP_CONTEXT_NO_OVERLAP);
          const auto debug = train_threads(setup);
          EXPECT_EQ(difference(setup, debug), "");
          for (uint32_t r = 0; r < ranks; ++r) {
            EXPECT_TRUE(same_bits(debug[r].weights, plain[r].weights)) << "rank " << r;
            EXPECT_TRUE(same_bits(debug[r].grads, plain[r].grads)) << "rank " << r;
            EXPECT_EQ(debug[r].norms, plain[r].norms);
            fsdp_context *context = nullptr;
            FSDP(fsdp_create_plan_context(ranks, r, &setup.context, &context));
            Memory planned;
            {
              Rank rank(context, setup);
              planned = memory_of(rank.model, r);
            }
            fsdp_destroy_context(context);
            for (int role = 0; role <= last_role; ++role)
              EXPECT_EQ(planned.role_bytes[role], debug[r].stats.allocated_bytes[role])
                  << "rank " << r << " role " << role;
          }
        }
}

}  // namespace
