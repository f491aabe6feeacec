// SPDX-License-Identifier: Apache-2.0
// Exceptions, moves and ends of handles in any order.
#include "ranks.h"

#include <atomic>
#include <chrono>
#include <mutex>

namespace {

TEST(Lifetime, AnExceptionInTheMiddleOfAForwardLeavesAModelThatTrainsOn) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    const auto forward = [&] {
      fsdp::Weights first = net.first.unshard(fsdp::Phase::forward);
      fsdp::Weights second = net.second.unshard(fsdp::Phase::forward);
      net.second.acquire_grad(0);
      if (second.get<float>(0)[0] > 0) throw std::runtime_error("the math has failed");
    };
    EXPECT_THROW(forward(), std::runtime_error);
    net.model.discard_step();
    net.step(0.5);
    EXPECT_NEAR(net.first.read_param<float>(0)[0], adamw(0.5, 1, 0.5), 1e-6);
    context.close();
  });
}

TEST(Lifetime, AGuardReturnsItsHoldWhereItsScopeEnds) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    {
      const fsdp::Weights weights = net.first.unshard(fsdp::Phase::forward);
      const fsdp::Weights moved_twice = [&] { return net.second.unshard(fsdp::Phase::forward); }();
    }
    net.step(0.5);  // a hold that is left is an error of finish_grads
    context.close();
  });
}

TEST(Lifetime, ALeakedGuardIsFoundAndTheStepDiscarded) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    new fsdp::Weights(net.first.unshard(fsdp::Phase::forward));  // NOLINT: the leak is what is tested
    EXPECT_EQ(status_of([&] { net.step(0.5); }), fsdp::Status::invalid_state);
    net.model.discard_step();
    net.step(0.5);
    context.close();
  });
}

TEST(Lifetime, AGuardOfADiscardedStepReturnsNoHoldOfALaterOne) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    auto old = std::make_unique<fsdp::Weights>(net.first.unshard(fsdp::Phase::forward));
    net.model.discard_step();
    fsdp::Weights later = net.first.unshard(fsdp::Phase::forward);
    old.reset();
    later.reshard();  // the hold is there still: else this throws
    net.step(0.5);
    context.close();
  });
}

TEST(Lifetime, HandlesEndInAnyOrder) {
  for (int order = 0; order < 6; ++order)
    run_ranks(2, [&](fsdp::Context &context) {
      auto owned = std::make_unique<fsdp::Context>(std::move(context));
      auto net = std::make_unique<TwoGroups>(*owned);
      auto weights = std::make_unique<fsdp::Weights>(net->first.unshard(fsdp::Phase::forward));
      const auto end = [&](int which) {
        if (which == 0) owned.reset();
        if (which == 1) net.reset();
        if (which == 2) weights.reset();
      };
      const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
      for (const int which : orders[order]) end(which);
    });
}

TEST(Lifetime, AGroupThatOutlivesItsModelIsAnInvalidHandle) {
  run_ranks(1, [](fsdp::Context &context) {
    auto net = std::make_unique<TwoGroups>(context);
    fsdp::Group group = net->first;
    net.reset();
    EXPECT_EQ(status_of([&] { (void)group.unshard(fsdp::Phase::eval); }), fsdp::Status::invalid_handle);
    EXPECT_EQ(status_of([&] { group.read_param<float>(0); }), fsdp::Status::invalid_handle);
    EXPECT_EQ(status_of([&] { (void)fsdp::Group().unshard(fsdp::Phase::eval); }), fsdp::Status::invalid_handle);
  });
}

TEST(Lifetime, WhatWasMovedFromThrowsAndWhatWasMovedToGoesOn) {
  run_ranks(2, [](fsdp::Context &context) {
    TwoGroups net(context);
    fsdp::Model model = std::move(net.model);
    EXPECT_EQ(status_of([&] { net.model.finish_grads(); }), fsdp::Status::invalid_handle);  // NOLINT: what is tested
    fsdp::Weights weights = net.first.unshard(fsdp::Phase::forward);
    fsdp::Weights moved = std::move(weights);
    EXPECT_EQ(status_of([&] { weights[0]; }), fsdp::Status::invalid_state);  // NOLINT
    EXPECT_EQ(status_of([&] { weights.reshard(); }), fsdp::Status::invalid_state);
    EXPECT_EQ(moved.get<float>(0)[0], 0.5f);
    moved.reshard();
    net.model = std::move(model);
    net.step(0.5);
    fsdp::Context there = std::move(context);
    EXPECT_EQ(status_of([&] { context.rank(); }), fsdp::Status::invalid_handle);  // NOLINT
    EXPECT_EQ(there.world_size(), 2u);
    EXPECT_EQ(net.model.group("second").name(), "second");
    EXPECT_EQ(net.model.find_param("first.bias").second, 1u);
    EXPECT_EQ(net.model.group(1).get(), net.second.get());
    there.close();
  });
}

// A context that is destroyed may still log.
struct Probe {
  std::weak_ptr<fsdp::detail::Hooks> hooks;
  bool *had_hooks;
};
void destroy_probe(Probe *probe) {
  *probe->had_hooks = !probe->hooks.expired();
  delete probe;
}
struct Owner {
  fsdp::detail::KeptHooks hooks;
  fsdp::detail::Handle<Probe, destroy_probe> raw;
};

TEST(Lifetime, HooksOutliveTheHandleThatIsAssignedOver) {
  bool had_hooks = false;
  const auto make = [&] {
    auto hooks = std::make_shared<fsdp::detail::Hooks>();
    auto *probe = new Probe{hooks, &had_hooks};
    return Owner{std::move(hooks), fsdp::detail::Handle<Probe, destroy_probe>(probe)};
  };
  Owner owner = make();
  owner = make();
  EXPECT_TRUE(had_hooks);
}

// An empty array does not count as zeros: put_no_grad and FullGrad() ask for those.
TEST(Errors, AnEmptyGradientIsOne) {
  run_ranks(1, [](fsdp::Context &context) {
    TwoGroups net(context);
    EXPECT_EQ(status_of([&] { net.first.put_grad("first.weight", std::vector<float>()); }),
              fsdp::Status::invalid_argument);
    EXPECT_EQ(status_of([&] { fsdp::FullGrad{std::vector<float>()}; }), fsdp::Status::invalid_argument);
    net.model.discard_step();
    context.close();
  });
}

TEST(Errors, AnErrorHasStatusRankAndMessage) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::Model model(context);
    model.create_group("g", {fsdp::Param("w", {4 + context.rank()})});
    try {
      model.seal();
      ADD_FAILURE() << "ranks have declared different shapes";
    } catch (const fsdp::Error &error) {
      EXPECT_EQ(error.status(), fsdp::Status::mismatch);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_EQ(error.origin(), fsdp::Origin::fsdp);
      EXPECT_EQ(std::string(error.what()), "FSDP_MISMATCH: " + error.message());
      EXPECT_EQ(context.last_error().status, FSDP_MISMATCH);
    }
  });
}

/** The status of rank 0's wait for a peer that never comes. */
fsdp::Status wait_for_nobody(const fsdp::ContextOptions &options, const std::function<void(fsdp::Context &)> &wait) {
  std::atomic<bool> done{false};
  fsdp::Status found = fsdp::Status::ok;
  run_ranks(
      2,
      [&](fsdp::Context &context) {
        while (context.rank() == 1 && !done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        if (context.rank() == 0) found = status_of([&] { wait(context); });
        done = true;
      },
      options);
  return found;
}

TEST(Hooks, AHookInterruptsAWait) {
  std::atomic<int> asked{0};
  fsdp::ContextOptions options;
  options.on_interrupted = [&] { return ++asked > 3; };
  const auto wait = [](fsdp::Context &context) { context.all_reduce_value(1, fsdp::ValueOp::sum); };
  EXPECT_EQ(wait_for_nobody(options, wait), fsdp::Status::interrupted);
  EXPECT_GE(asked, 4);
}

TEST(Hooks, WhatAHookThrowsComesOutOfTheCall) {
  fsdp::ContextOptions options;
  options.on_interrupted = []() -> bool { throw std::length_error("of the hook"); };
  const auto wait = [](fsdp::Context &context) {
    EXPECT_THROW(context.all_reduce_value(1, fsdp::ValueOp::sum), std::length_error);
    EXPECT_EQ(context.rank(), 0u);  // no other call throws
  };
  EXPECT_EQ(wait_for_nobody(options, wait), fsdp::Status::ok);
}

TEST(Hooks, LogLinesComeToTheHookAlsoOfAModelWhoseContextObjectHasGone) {
  std::mutex mutex;
  std::vector<std::string> lines;
  fsdp::ContextOptions options;
  options.log_level = FSDP_LOG_DEBUG;
  options.on_log = [&](fsdp::LogLevel, std::string_view line) {
    const std::lock_guard<std::mutex> lock(mutex);
    lines.emplace_back(line);
  };
  run_ranks(
      1,
      [&](fsdp::Context &context) {
        TwoGroups net(context);
        const fsdp::Context gone = std::move(context);
      },
      options);
  EXPECT_FALSE(lines.empty());
}

TEST(Values, AreReducedOverTheWorldOrAMesh) {
  run_ranks(4, [](fsdp::Context &context) {
    const double rank = context.rank();
    EXPECT_EQ(context.all_reduce_value(rank, fsdp::ValueOp::max), 3);
    const std::vector<std::uint32_t> half =
        rank < 2 ? std::vector<std::uint32_t>{0, 1} : std::vector<std::uint32_t>{2, 3};
    fsdp::MeshOptions options;
    options.ranks = half.data();
    options.rank_count = 2;
    const fsdp::Mesh mesh(context, options);
    EXPECT_EQ(context.all_reduce_value(rank, fsdp::ValueOp::sum, &mesh), rank < 2 ? 1 : 5);
    context.begin_span("here");
    context.end_span();
    context.close();
  });
}

TEST(Build, IsTold) {
  EXPECT_NE(fsdp::describe_build().find(fsdp::get_version()), std::string::npos);
  EXPECT_EQ(fsdp::get_status_name(fsdp::Status::timeout), "FSDP_TIMEOUT");
  EXPECT_EQ(fsdp::get_dtype_size(fsdp::DType::bfloat16), 2u);
}

}  // namespace
