// SPDX-License-Identifier: Apache-2.0
// Everything that determines where main gradients are stored and when they are summed: strategies, policies, axes,
// modes.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "device.h"
#include "harness.h"

namespace harness {

enum class Axes { one, hsdp, hfsdp, hosts };
inline constexpr Axes every_axes[] = {Axes::one, Axes::hsdp, Axes::hfsdp, Axes::hosts};

inline Scenario setup_over(Axes axes, fsdp_strategy strategy, uint32_t ranks) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  if (axes == Axes::hosts) setup.context.ranks_per_host = ranks / 2;
  if (axes == Axes::hsdp || axes == Axes::hfsdp) setup.mesh.replicate_size = 2, setup.mesh.shard_size = ranks / 2;
  if (axes == Axes::hfsdp) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  return setup;
}

// Uses every n-th setup under a sanitizer, and every fifth over a simulated GPU, which takes five times as long. Modes
// are flags of the context, and are tried with two ranks.
inline void for_every_setup(unsigned nth, std::initializer_list<uint32_t> modes,
                            const std::function<void(const Scenario &)> &use) {
  Sample sample(nth);
  unsigned number = 0;
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST})
      for (const Axes axes : every_axes)
        for (const uint32_t ranks : {1u, 2u, 3u, 4u})
          for (const uint32_t flags : modes) {
            if (strategy == FSDP_STRATEGY_OPTIM && policy == FSDP_REDUCE_POLICY_EACH) continue;
            if ((axes != Axes::one && ranks % 2) || (flags && ranks != 2)) continue;
            if (!sample.takes_next() || (on_gpu() && number++ % 5)) continue;
            Scenario setup = setup_over(axes, strategy, ranks);
            setup.model.reduce_policy = policy;
            setup.context.flags = flags;
            SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", policy " << policy << ", axes "
                                            << static_cast<int>(axes) << ", ranks " << ranks << ", flags " << flags);
            use(setup);
          }
}

}  // namespace harness
