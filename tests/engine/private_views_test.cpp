// SPDX-License-Identifier: Apache-2.0
// FSDP_VIEWS_PRIVATE: if a program wrongly writes into a view of weights, only that view shows it, page by page, until
// fsdp_restore_view, a publish or a discard. No other bit changes.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstring>
#include <span>

#include "checkpoint_folder.h"
#include "train_as_planned.h"

using namespace harness;

namespace {

constexpr fsdp_unshard_mode modes[] = {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED};
constexpr uint64_t page = 4096;

Scenario private_scenario(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_MAPPED) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  setup.model.view_kind = FSDP_VIEWS_PRIVATE;
  return setup;
}

// Are the weights that a rank sees in a pool buffer?
bool is_copied(const Scenario &setup) {
  return setup.model.strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS && setup.model.unshard_mode == FSDP_UNSHARD_COPIED &&
         (setup.ranks > 1 || setup.context.flags & FSDP_CONTEXT_DEBUG || setup.model.flags);
}

fsdp_tensor view_of(const Rank &rank, size_t g, size_t p, fsdp_phase phase, fsdp_plane plane = 0) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  if (plane)
    FSDP(fsdp_get_plane(rank.groups[g], p, phase, plane, &view));
  else
    FSDP(fsdp_get_param(rank.groups[g], p, phase, &view));
  REQUIRE(view.flags & FSDP_TENSOR_READ_ONLY);
  return view;
}

// All that a rank may read of a group in that phase.
std::vector<std::span<unsigned char>> views_of(const Rank &rank, size_t g, fsdp_phase phase) {
  std::vector<std::span<unsigned char>> views;
  const auto add = [&](const fsdp_tensor &view) {
    views.emplace_back(static_cast<unsigned char *>(view.data), view.element_count * view.element_size);
  };
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    const fsdp_quantization kind = rank.def(g).params[p].quantization;
    const bool columns = kind == FSDP_QUANTIZE_MXFP8 && phase == FSDP_BACKWARD;
    if (!kind) {
      add(view_of(rank, g, p, phase));
    } else {
      add(view_of(rank, g, p, phase, columns ? FSDP_PLANE_COLUMN : FSDP_PLANE_ROW));
      add(view_of(rank, g, p, phase, columns ? FSDP_PLANE_COLUMN_SCALE : FSDP_PLANE_ROW_SCALE));
    }
  }
  return views;
}

bool is_all(std::span<const unsigned char> bytes, unsigned char value) {
  return std::ranges::all_of(bytes, [&](unsigned char byte) { return byte == value; });
}

unsigned char mark_of(const Rank &rank) { return static_cast<unsigned char>(0xA0 + rank.rank); }

// Overwrites every weight of the group that this rank can see; only it sees that.
void spoil(const Rank &rank, size_t g, fsdp_phase phase) {
  for (const auto view : views_of(rank, g, phase)) std::ranges::fill(view, mark_of(rank));
  for (const auto view : views_of(rank, g, phase)) REQUIRE(is_all(view, mark_of(rank)));
}

// Every rank overwrites all weights in every visit. The weights that later visits of the step read are restored before;
// those after a backward visit are restored by the publish.
Scenario spoiling(Scenario setup) {
  setup.eval = true;
  setup.recompute = true;
  const bool copied = is_copied(setup);
  setup.visited = [copied](const Rank &rank, size_t g, fsdp_phase phase, bool held) {
    if (copied && phase == FSDP_RECOMPUTE) return;  // the backward visit holds the same buffer
    if (held) return spoil(rank, g, phase);
    if (phase != FSDP_BACKWARD) FSDP(fsdp_restore_view(rank.groups[g]));
  };
  return setup;
}

TEST(PrivateViews, AStrayWriteChangesNoBitOfTraining) {
  Sample sample(5);
  for (const uint32_t ranks : {1u, 2u, 3u})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_unshard_mode mode : modes)
        for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16})
          for (const uint32_t flags : {0u, FSDP_CONTEXT_NO_OVERLAP + 0u, FSDP_CONTEXT_DEBUG + 0u}) {
            if (!sample.takes_next()) continue;
            Scenario setup = private_scenario(strategy, ranks, mode);
            setup.context.flags = flags;
            setup.set_dtype(dtype);
            EXPECT_EQ(train_as_planned(spoiling(setup)), "") << ranks << " ranks, strategy " << strategy << ", mode "
                                                             << mode << ", dtype " << dtype << ", flags " << flags;
          }
}

TEST(PrivateViews, AStrayWriteChangesNoBitOfTrainingOfProcesses) {
  Sample sample(5);
  for (const uint32_t ranks : {1u, 2u, 3u})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
        if (!sample.takes_next()) continue;
        Scenario setup = private_scenario(strategy, ranks);
        setup.set_dtype(dtype);
        EXPECT_EQ(train_as_planned(spoiling(setup), true), "")
            << ranks << " ranks, strategy " << strategy << ", dtype " << dtype;
      }
}

TEST(PrivateViews, AStrayWriteChangesNoBitOverTwoAxesAndHosts) {
  Sample sample(5);
  for (const char *kind : {"hsdp", "hfsdp", "hosts"})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_unshard_mode mode : modes) {
        if (!sample.takes_next()) continue;
        Scenario setup = private_scenario(strategy, 4, mode);
        if (std::string(kind) == "hosts") setup.context.ranks_per_host = 2;
        if (std::string(kind) != "hosts") setup.mesh.replicate_size = setup.mesh.shard_size = 2;
        if (std::string(kind) == "hfsdp") setup.model.outer_strategy = FSDP_OUTER_OPTIM;
        EXPECT_EQ(train_as_planned(spoiling(setup)), "") << kind << ", strategy " << strategy << ", mode " << mode;
      }
}

TEST(PrivateViews, AStrayWriteChangesNoBitWithOtherPoliciesAndKinds) {
  const auto train = [](const char *what, const std::function<void(Scenario &)> &change) {
    for (const fsdp_strategy strategy : strategies) {
      Scenario setup = private_scenario(strategy, 2);
      change(setup);
      EXPECT_EQ(train_as_planned(spoiling(setup)), "") << what << ", strategy " << strategy;
    }
  };
  train("reduced last", [](Scenario &setup) { setup.model.reduce_policy = FSDP_REDUCE_POLICY_LAST; });
  train("interleaved", [](Scenario &setup) { setup.schedule = FSDP_SCHEDULE_INTERLEAVED; });
  train("resident", [](Scenario &setup) { setup.groups[1].options.flags = FSDP_GROUP_RESIDENT; });
  train("frozen", [](Scenario &setup) { setup.groups[1].params[2].flags = FSDP_PARAM_FROZEN; });
  train("clipped", [](Scenario &setup) { setup.clip = 0.5; });
  for (const fsdp_quantization kind : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8, FSDP_QUANTIZE_FP8_BLOCK})
    train("quantized", [kind](Scenario &setup) {
      setup.model.plane_policy = FSDP_PLANES_BY_PHASE_AND_RECOMPUTE;
      setup.groups = {{"a", {quantized({"a.w", {64, 96}}, kind), {"a.b", {7}}}},
                      {"b", {quantized({"b.w", {32, 64}}, kind)}}};
    });
}

// Weights of two groups of some pages each. No other rank sees what rank 0 does.
struct Large {
  explicit Large(Scenario scenario) : setup(std::move(scenario)) { setup.groups = equal_groups(2, 64, 1024); }
  static bool is_loaded(const Rank &rank, size_t g, const float *seen, uint64_t but) {
    for (uint64_t i = 0; i < 64 * 1024; ++i)
      if (i != but && seen[i] != initial_weight(rank.setup.ordinal(g, 0), i)) return false;
    return true;
  }
  Scenario setup;
};

constexpr uint64_t nowhere = UINT64_MAX, somewhere = 20'000;

TEST(PrivateViews, OnlyTheViewThatWasWrittenShowsItAndUntilItIsRestored) {
  for (const uint32_t ranks : {1u, 2u, 3u})
    for (const fsdp_strategy strategy : strategies) {
      const Large large(private_scenario(strategy, ranks));
      std::barrier together(static_cast<ptrdiff_t>(ranks));
      run_threads(large.setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, large.setup);
        rank.load();
        const auto main = rank.read_all();
        for (size_t g : {0, 1}) FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        float *views[2];
        for (size_t g : {0, 1}) views[g] = static_cast<float *>(view_of(rank, g, 0, FSDP_FORWARD).data);
        if (r == 0)
          for (float *view : views) view[somewhere] = 1e30f;
        const auto shows = [&](size_t g, bool spoilt) {
          return Large::is_loaded(rank, g, views[g], r == 0 && spoilt ? somewhere : nowhere) &&
                 (r != 0 || (views[g][somewhere] == 1e30f) == spoilt);
        };
        together.arrive_and_wait();
        REQUIRE(shows(0, true) && shows(1, true));
        REQUIRE(rank.read_all() == main);
        FSDP(fsdp_restore_view(rank.groups[1]));  // held
        REQUIRE(shows(0, true) && shows(1, false));
        FSDP(fsdp_restore_view(rank.groups[1]));  // nothing is left to restore
        for (size_t g : {0, 1}) FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        FSDP(fsdp_restore_view(rank.groups[0]));  // not held
        FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
        REQUIRE(shows(0, false) && shows(1, false));
        FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
        REQUIRE(rank.read_all() == main);
        FSDP(fsdp_close_context(context));
      });
    }
}

// In the update window, where main weights of fp32 are the compute weights and their owners write them.
TEST(PrivateViews, OtherPagesFollowWhatTheOwnersWrite) {
  for (const uint32_t ranks : {1u, 2u, 3u})
    for (const fsdp_strategy strategy : strategies) {
      Large large(private_scenario(strategy, ranks));
      large.setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
      std::barrier together(static_cast<ptrdiff_t>(ranks));
      run_threads(large.setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, large.setup);
        rank.load();
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        auto *view = static_cast<float *>(view_of(rank, 0, 0, FSDP_FORWARD).data);
        view[somewhere] = 1e30f;
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        reduce_all(rank, 1);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        for (const fsdp_shard &shard : rank.shards())
          for (uint64_t i = 0; i < shard.element_count; ++i) main_weight(shard)[i] = 5;
        together.arrive_and_wait();
        const auto *first = reinterpret_cast<float *>(reinterpret_cast<uintptr_t>(view + somewhere) / page * page);
        for (uint64_t i = 0; i < 64 * 1024; ++i) {
          const bool stale = view + i >= first && view + i < first + page / sizeof(float);
          const float expected = i == somewhere ? 1e30f : stale ? initial_weight(0, i) : 5;
          REQUIRE(view[i] == expected);
        }
        together.arrive_and_wait();
        if (r == 0) FSDP(fsdp_restore_view(rank.groups[0]));  // in the window
        REQUIRE(view[somewhere] == (r == 0 ? 5 : 1e30f));
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        for (uint64_t i = 0; i < 64 * 1024; ++i) REQUIRE(view[i] == 5);
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

// Without fsdp_restore_view: a step that publishes, a publish, and a step that is given up.
TEST(PrivateViews, APublishAndADiscardRestoreThem) {
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_unshard_mode mode : modes) {
      Scenario setup = private_scenario(strategy, 2, mode);
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        const auto spoil_all = [&] {
          for (size_t g = 0; g < rank.groups.size(); ++g) {
            FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
            spoil(rank, g, FSDP_FORWARD);
            FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
          }
        };
        const auto expect_truth = [&] {
          for (size_t g = 0; g < rank.groups.size(); ++g) {
            FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
            for (size_t p = 0; p < rank.def(g).params.size(); ++p)
              REQUIRE(rank.view(g, p, FSDP_EVAL) == rank.read(g, p));
            FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
          }
        };
        spoil_all();
        FSDP(fsdp_begin_update(rank.model, nullptr));
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        expect_truth();
        spoil_all();
        reduce_all(rank, 1);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        update(rank);
        expect_truth();
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        spoil(rank, 0, FSDP_FORWARD);  // held
        FSDP(fsdp_discard_step(rank.model, nullptr));
        expect_truth();
        FSDP(fsdp_close_context(context));
      });
    }
}

class PrivateViewsSaved : public Checkpoint {};

TEST_F(PrivateViewsSaved, ACheckpointHasTheWeightsAndNotWhatWasWritten) {
  for (const uint32_t ranks : {1u, 2u})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
        Scenario setup = private_scenario(strategy, ranks);
        setup.set_dtype(dtype);
        setup.groups[1].params[2].flags = FSDP_PARAM_FROZEN;  // whose compute weights are what is saved
        const std::string folder =
            path + "/" + std::to_string(ranks) + std::to_string(strategy) + std::to_string(dtype);
        std::vector<std::vector<float>> before;
        run(setup, "saved", [&](Rank &rank) {
          rank.load();
          clean_step(rank, 0);
          const auto all = everything(rank);
          for (size_t g = 0; g < rank.groups.size(); ++g) {
            FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
            spoil(rank, g, FSDP_EVAL);
            FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
          }
          REQUIRE(same_bits(everything(rank), all));
          FSDP(fsdp_check_replicas(rank.model, 0, nullptr));
          FSDP(save(rank, folder));
          REQUIRE(same_bits(everything(rank), all));
          if (rank.rank == 0) before = all;
        });
        run(setup, "loaded", [&](Rank &rank) {
          FSDP(load(rank, folder));
          FSDP(fsdp_publish_weights(rank.model, nullptr));
          REQUIRE(same_bits(everything(rank), before));
        });
      }
}

// Copied views are private in any case: a write stays as long as the group is gathered, here until the backward visit.
TEST(PrivateViews, CopiedWeightsAreGatheredAgain) {
  for (const fsdp_view_kind kind : {0, FSDP_VIEWS_READ_ONLY + 0, FSDP_VIEWS_PRIVATE + 0}) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    setup.model.view_kind = kind;
    setup.model.flags = FSDP_MODEL_NO_PREFETCH;
    for (GroupDef &group : setup.groups) group.options.flags = FSDP_GROUP_RESIDENT;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      fsdp_group *group = rank.groups[1];
      FSDP(fsdp_restore_view(group));  // nothing is gathered
      FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));
      spoil(rank, 1, FSDP_FORWARD);
      FSDP(fsdp_reshard(group, FSDP_EVAL, 0, nullptr));
      require_error(
          fsdp_restore_view(group), FSDP_INVALID_STATE,
          {"fsdp_restore_view: group 'layer.0'", "copied weights", "still held (FORWARD x 1)", "fsdp_reshard first"});
      FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
      const uint64_t gathers = rank.stats().gathers;
      FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
      REQUIRE(rank.stats().gathers == gathers);
      for (const auto view : views_of(rank, 1, FSDP_FORWARD)) REQUIRE(is_all(view, mark_of(rank)));
      FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_restore_view(group));
      FSDP(fsdp_unshard(group, FSDP_BACKWARD, 0, nullptr));
      REQUIRE(rank.stats().gathers == gathers + 1);
      for (size_t p = 0; p < rank.def(1).params.size(); ++p) REQUIRE(rank.view(1, p, FSDP_BACKWARD) == rank.read(1, p));
      FSDP(fsdp_reshard(group, FSDP_BACKWARD, 0, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

// Groups of any size have pages of their own.
TEST(PrivateViews, ARestoreIsOfOneGroup) {
  for (const uint32_t ranks : {1u, 2u})
    for (const fsdp_strategy strategy : strategies) {
      const Scenario setup = private_scenario(strategy, ranks);
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        for (size_t g = 0; g < 4; ++g) {
          FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
          spoil(rank, g, FSDP_FORWARD);
        }
        FSDP(fsdp_restore_view(rank.groups[2]));
        for (size_t g = 0; g < 4; ++g) {
          for (const auto view : views_of(rank, g, FSDP_FORWARD)) REQUIRE(is_all(view, mark_of(rank)) == (g != 2));
          FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        }
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(PrivateViews, AViewThatIsReadOnlyIsNotRestored) {
  for (const uint32_t ranks : {1u, 2u})
    for (const fsdp_strategy strategy : strategies) {
      const Scenario setup = scenario_of(strategy, ranks, FSDP_UNSHARD_MAPPED);
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        require_error(fsdp_restore_view(rank.groups[0]), FSDP_INVALID_STATE,
                      {"fsdp_restore_view: group 'embed'", "view_kind FSDP_VIEWS_READ_ONLY", "FSDP_VIEWS_PRIVATE",
                       strategy == FSDP_STRATEGY_NO_SHARD ? "are the weights themselves" : "is a fault"});
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(PrivateViews, GroupsWithoutParametersHaveNothingToRestore) {
  Scenario setup = private_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups.push_back({"empty", {}});
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_restore_view(rank.groups.back()));
    FSDP(fsdp_close_context(context));
  });
}

TEST(PrivateViews, APlanningContextKnowsTheirBytes) {
  for (const uint32_t ranks : {1u, 3u})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_unshard_mode mode : modes) {
        const Scenario setup = private_scenario(strategy, ranks, mode);
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          const Rank rank(context, setup);
          fsdp_context *planning = nullptr;
          FSDP(fsdp_create_plan_context(ranks, r, &setup.context, &planning));
          {
            const Rank planned(planning, setup);
            REQUIRE(memory_of(planned.model, r).role_bytes == rank.stats().allocated_bytes);
            require_error(fsdp_restore_view(planned.groups[0]), FSDP_INVALID_STATE, {"fsdp_restore_view", "plan"});
          }
          fsdp_destroy_context(planning);
        });
      }
}

// A write there must not change the rank's weights, and the view ends with the hold.
TEST(PrivateViews, DebugModeTakesThemAway) {
  if (is_thread_sanitized()) GTEST_SKIP() << "it has views of its own for what is not private";
  for (const uint32_t ranks : {1u, 2u})
    for (const fsdp_strategy strategy : strategies) {
      Scenario setup = private_scenario(strategy, ranks);
      setup.context.flags = FSDP_CONTEXT_DEBUG;
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        const bool whole = strategy != FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        spoil(rank, 0, FSDP_FORWARD);
        void *const view = view_of(rank, 0, 0, FSDP_FORWARD).data;
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        int ends[2];
        REQUIRE(::pipe(ends) == 0);
        REQUIRE((::write(ends[1], view, 1) == 1) == whole);
        FSDP(fsdp_restore_view(rank.groups[0]));
        REQUIRE((::write(ends[1], view, 1) == 1) == whole);
        FSDP(fsdp_begin_update(rank.model, nullptr));
        REQUIRE(::write(ends[1], view, 1) == -1);
        for (const int end : ends) ::close(end);
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        REQUIRE(rank.view(0, 0, FSDP_FORWARD) == rank.read(0, 0));
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

// A forked child inherits no memory that ranks share: contexts do not survive a fork.
TEST(PrivateViews, AForkedChildHasThemNot) {
  const Scenario setup = private_scenario(FSDP_STRATEGY_NO_SHARD, 1);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    auto *const view =
        reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(view_of(rank, 0, 0, FSDP_FORWARD).data) / page * page);
    unsigned char resident = 0;
    REQUIRE(::mincore(view, page, &resident) == 0);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::mincore(view, page, &resident) != 0 && errno == ENOMEM ? 0 : 1);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child && status == 0);
    FSDP(fsdp_close_context(context));
  });
}

// The calls that read for the caller read the weights, and not its view.
TEST(PrivateViews, SwizzledScalesAreThoseOfTheWeights) {
  Scenario setup = private_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"a", {quantized({"a.w", {128, 128}}, FSDP_QUANTIZE_MXFP8)}}};
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    const auto swizzled = [&] {
      std::vector<unsigned char> scales(4096);
      uint64_t size = scales.size();
      FSDP(fsdp_swizzle_scales(rank.groups[0], 0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE, scales.data(), &size, nullptr));
      return scales;
    };
    const auto before = swizzled();
    spoil(rank, 0, FSDP_FORWARD);
    REQUIRE(swizzled() == before);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
