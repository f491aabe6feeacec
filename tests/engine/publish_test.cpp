// SPDX-License-Identifier: Apache-2.0
// The publish protocol under stress: every element that is read while the weights of version v are unsharded equals v,
// with readers and writers at different speeds.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "held_up.h"

using namespace harness;

namespace {

float element(const void *data, fsdp_dtype dtype, uint64_t i) {
  if (dtype == FSDP_FLOAT32) return static_cast<const volatile float *>(data)[i];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const volatile uint16_t *>(data)[i]) << 16);
}

// Another thread of the same rank. The owner waits while it works, so that only one thread at a time is in the context.
class Helper {
 public:
  Helper() : thread_([this] { work(); }) {}
  ~Helper() {
    hand_over({});
    thread_.join();
  }
  Helper(const Helper &) = delete;
  Helper &operator=(const Helper &) = delete;
  void run(const std::function<void()> &task) {
    hand_over(task);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy_; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void hand_over(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    task_ = std::move(task);
    busy_ = true;
    changed_.notify_all();
  }
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return busy_; });
      if (!task_) return;
      try {
        task_();
      } catch (...) {
        error_ = std::current_exception();
      }
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;
  bool busy_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

enum class Loop { sequential, accumulate, interleaved, delayed };
constexpr const char *loop_names[] = {"Sequential", "Accumulate", "Interleaved", "Delayed"};

struct Stress {
  uint32_t ranks;
  fsdp_unshard_mode mode;
  fsdp_dtype dtype;
  fsdp_strategy strategy;
  Loop loop;
};

// The weights of version v are all v; the gradients given are v too.
class VersionedRank {
 public:
  VersionedRank(fsdp_context *context, const Scenario &scenario, const Stress &stress)
      : rank_(context, scenario), stress_(stress), random_(rank_.rank * 7919 + stress.ranks) {
    publish();
  }

  void step() {
    pass(FSDP_EVAL);
    switch (stress_.loop) {
      case Loop::sequential:
        pass(FSDP_FORWARD);
        for (size_t g = groups(); g-- > 0;) backward(g, true);
        break;
      case Loop::accumulate:
        for (int m = 0; m < 3; ++m) {
          pass(FSDP_FORWARD);
          for (size_t g = groups(); g-- > 0;) backward(g, m == 2);
        }
        break;
      case Loop::interleaved: interleave(4); break;
      case Loop::delayed: delay_weight_gradients(); break;
    }
    // All reduces are under way and some ranks have already reached the end of the step: only their wait protects the
    // gradients.
    pass(FSDP_EVAL);
    FSDP(fsdp_finish_grads(rank_.model, 1.0, 0, nullptr));
    check_grads(stress_.loop == Loop::accumulate ? 3 : stress_.loop == Loop::interleaved ? 4 : 1);
    publish();
  }

  Rank &rank() { return rank_; }

 private:
  size_t groups() const { return rank_.groups.size(); }
  void linger(uint32_t chance = 4) {
    if (random_() % chance == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));
  }

  // The write is done in two halves, so a rank that reads too early, or continues from the previous version, sees both
  // numbers.
  void publish() {
    const std::vector<fsdp_shard> shards = rank_.shards();
    for (const int half : {0, 1}) {
      for (const fsdp_shard &shard : shards)
        for (uint64_t i = static_cast<uint64_t>(half); i < shard.element_count; i += 2)
          static_cast<volatile float *>(shard.main_weight)[i] = static_cast<float>(version_ + 1);
      linger();
    }
    FSDP(fsdp_publish_weights(rank_.model, nullptr));
    ++version_;
    REQUIRE(rank_.stats().version == version_);
  }

  void check(size_t g, fsdp_phase phase) {
    for (size_t p = 0; p < rank_.def(g).params.size(); ++p) {
      fsdp_tensor tensor = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_param(rank_.groups[g], p, phase, &tensor));
      REQUIRE(tensor.element_count == rank_.def(g).params[p].count() && tensor.dtype == stress_.dtype);
      for (uint64_t i = 0; i < tensor.element_count; ++i) {
        const float seen = element(tensor.data, tensor.dtype, i);
        if (seen != static_cast<float>(version_))
          throw std::runtime_error("rank " + std::to_string(rank_.rank) + " sees " + std::to_string(seen) + " in " +
                                   rank_.def(g).params[p].name + "[" + std::to_string(i) + "], the version is " +
                                   std::to_string(version_));
      }
    }
  }

  void hold(size_t g, fsdp_phase phase) {
    FSDP(fsdp_unshard(rank_.groups[g], phase, 0, nullptr));
    check(g, phase);
    linger();
  }
  void release(size_t g, fsdp_phase phase) {
    check(g, phase);
    FSDP(fsdp_reshard(rank_.groups[g], phase, 0, nullptr));
    linger(8);
  }

  void pass(fsdp_phase phase) {
    for (size_t g = 0; g < groups(); ++g) {
      hold(g, phase);
      release(g, phase);
    }
  }

  void give(size_t g, bool last) {
    put_all(rank_, g, static_cast<float>(version_));
    linger(8);
    FSDP(fsdp_reduce_grad(rank_.groups[g], last ? FSDP_LAST : 0, nullptr));
  }

  void backward(size_t g, bool last) {
    hold(g, FSDP_BACKWARD);
    release(g, FSDP_BACKWARD);
    give(g, last);
  }

  // Forward of the next micro-batch holds group i while backward of this one is at group n - 1 - i.
  void interleave(int microbatches) {
    pass(FSDP_FORWARD);
    for (int m = 0; m < microbatches; ++m)
      for (size_t i = 0; i < groups(); ++i) {
        const bool more = m + 1 < microbatches;
        if (more) hold(i, FSDP_FORWARD);
        backward(groups() - 1 - i, !more);
        if (more) release(i, FSDP_FORWARD);
      }
  }

  // The gradient of a group comes when the backward pass is at the next one already, from another thread.
  void delay_weight_gradients() {
    pass(FSDP_FORWARD);
    for (size_t g = groups(); g-- > 0;) {
      hold(g, FSDP_BACKWARD);
      if (g + 1 < groups()) helper_.run([&] { give(g + 1, true); });
      release(g, FSDP_BACKWARD);
    }
    helper_.run([&] { give(0, true); });
  }

  void check_grads(uint32_t contributions) {
    for (const fsdp_shard &shard : rank_.shards())
      for (uint64_t i = 0; i < shard.element_count; ++i)
        REQUIRE(main_grad(shard)[i] == static_cast<float>(version_ * stress_.ranks * contributions));
  }

  Rank rank_;
  Stress stress_;
  std::minstd_rand random_;
  uint64_t version_ = 0;
  Helper helper_;
};

Scenario stress_scenario(const Stress &stress) {
  Scenario scenario = scenario_of(stress.strategy, stress.ranks, stress.mode);
  scenario.set_dtype(stress.dtype);
  scenario.model.optimizer = FSDP_OPTIMIZER_CALLER;
  scenario.model.grad_op = FSDP_GRAD_OP_SUM;
  scenario.model.grad_dtype = FSDP_FLOAT32;
  if (stress.loop == Loop::interleaved) scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
  return scenario;
}

class Publish : public testing::TestWithParam<Stress> {};

TEST_P(Publish, EveryElementReadIsOfTheVersionPublished) {
  const Scenario scenario = stress_scenario(GetParam());
  std::atomic<uint32_t> done{0};
  constexpr uint32_t steps = 10;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    {
      VersionedRank rank(context, scenario, GetParam());
      for (uint32_t s = 0; s < steps; ++s, ++done) rank.step();
    }
    FSDP(fsdp_close_context(context));
  });
  EXPECT_EQ(done, steps * scenario.ranks);
}

std::vector<Stress> all_stresses() {
  std::vector<Stress> all;
  Sample sample(5);  // shares no factor with the number of loops
  const auto add = [&](const Stress &stress) {
    if (sample.takes_next()) all.push_back(stress);
  };
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {2u, 3u, 4u}) {
      if (strategy != FSDP_STRATEGY_OPTIM_GRADS_PARAMS && ranks != 3) continue;
      for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
        for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16})
          for (const Loop loop : {Loop::sequential, Loop::accumulate, Loop::interleaved, Loop::delayed})
            add({ranks, mode, dtype, strategy, loop});
    }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Publish, testing::ValuesIn(all_stresses()), [](const auto &info) {
  const Stress &stress = info.param;
  return std::to_string(stress.ranks) + (stress.mode == FSDP_UNSHARD_MAPPED ? "Mapped" : "Copied") +
         (stress.dtype == FSDP_FLOAT32 ? "Float32" : "Bfloat16") + loop_names[static_cast<int>(stress.loop)] +
         "Strategy" + std::to_string(stress.strategy);
});

// Rank 1 comes first and is held up; the others come, and need nothing more of it than its part of the new weights.
// Where the strategy keeps weights whole they are there when the call returns, elsewhere when fsdp_unshard does.
TEST(PublishWaits, ForThePartOfARankThatIsHeldUp) {
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = stress_scenario({3, mode, FSDP_BFLOAT16, strategy, Loop::sequential});
      HeldUp::arm(scenario);
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        FSDP(fsdp_begin_update(rank.model, nullptr));
        for (const fsdp_shard &shard : rank.shards()) std::fill_n(main_weight(shard), shard.element_count, 7.0f);
        HeldUp::enter(r == 1);
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        const bool whole = strategy != FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
        for (size_t g = 0; g < rank.groups.size(); ++g) {
          if (!whole) FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
          for (size_t p = 0; p < rank.def(g).params.size(); ++p)
            for (const float seen : rank.view(g, p, FSDP_EVAL)) REQUIRE(seen == 7.0f);
          if (!whole) FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
        }
        FSDP(fsdp_close_context(context));
      });
    }
}

// Two micro-batches hold one group at once, and return it one after the other, over a publish.
TEST(PublishHolds, TwoMicrobatchesHoldOneGroup) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    const Stress stress{3, mode, FSDP_FLOAT32, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Loop::sequential};
    const Scenario scenario = stress_scenario(stress);
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      {
        VersionedRank versioned(context, scenario, stress);
        Rank &rank = versioned.rank();
        for (int s = 0; s < 5; ++s) {
          const auto version = static_cast<float>(s + 1);
          for (int hold = 0; hold < 2; ++hold) FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
          FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
          for (const float seen : rank.view(1, 0, FSDP_FORWARD)) REQUIRE(seen == version);
          FSDP(fsdp_unshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
          FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
          for (const float seen : rank.view(1, 0, FSDP_BACKWARD)) REQUIRE(seen == version);
          FSDP(fsdp_reshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
          versioned.step();
        }
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
