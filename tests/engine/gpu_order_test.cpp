// SPDX-License-Identifier: Apache-2.0
// Over simulated GPUs, with a stream for each kind of work: whichever stream is late, each one reads what a program on
// one stream reads. docs/contracts/streams-and-threads.md lists what waits for what; these tests fail where one of
// those waits is missing.
#include <gtest/gtest.h>

#include "gpu_order.h"

using namespace order;

namespace {

struct Setup {
  Layout layout;
  fsdp_strategy strategy;
};

class GpuOrder : public testing::TestWithParam<Setup> {};

TEST_P(GpuOrder, NoBitChangesWhicheverStreamIsLate) {
  const Scenario setup = order_scenario(GetParam().layout, GetParam().strategy);
  const auto expected = run_program(setup, false, Late::nobody);
  for (const Late late : all_late) {
    if (late == Late::outer && GetParam().layout < Layout::hsdp) continue;
    if (late == Late::rank && setup.ranks == 1) continue;
    if (setup.ranks == 4 && late < Late::updates) continue;  // as with two ranks
    EXPECT_EQ(compare(expected, run_program(setup, true, late)), "") << "late: " << late_names[static_cast<int>(late)];
  }
}

// Each piece is read on another stream than the piece before. The next gathers go to the buffers of pieces that were
// given back, or, if no visit names the pieces, of whole groups.
TEST(GpuPieceOrder, NoBitChangesWhicheverStreamIsLate) {
  Scenario setup = order_scenario(Layout::flat, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  for (GroupDef &group : setup.groups) {
    group.params.push_back({group.name + ".u", {24, 8}, FSDP_BFLOAT16});
    for (uint32_t p = 0; p < 3; ++p) group.params[p].piece = (p + 1) / 2;
  }
  setup.by_piece = true;
  const auto expected = run_program(setup, false, Late::nobody);
  for (const bool visits : {true, false}) {
    setup.schedule = visits ? FSDP_SCHEDULE_VISITS : FSDP_SCHEDULE_SEQUENTIAL;
    setup.visits = visits_of_pieces(setup.groups);
    for (const Late late : {Late::readers, Late::updates, Late::gathers, Late::rank})
      EXPECT_EQ(compare(expected, run_program(setup, true, late)), "")
          << "late: " << late_names[static_cast<int>(late)] << (visits ? ", by visits" : "");
  }
}

// The calls of a discarded step have enqueued work that is late, and the GPU may still run the step before, which has
// ended well. The discard must not undo that step, and the next step comes after all of this work.
class GpuDiscard : public testing::TestWithParam<fsdp_strategy> {};

TEST_P(GpuDiscard, NothingIsLeftAndTheStepBeforeStaysWhicheverStreamIsLate) {
  const Scenario setup = order_scenario(Layout::flat, GetParam());
  const auto expected = run_program(setup, false, Late::nobody, true);
  for (const Late late : {Late::readers, Late::writers, Late::writer, Late::gathers, Late::reduces, Late::rank})
    EXPECT_EQ(compare(expected, run_program(setup, true, late, true)), "")
        << "late: " << late_names[static_cast<int>(late)];
}

std::vector<Setup> all_setups() {
  std::vector<Setup> all;
  for (const Layout layout : {Layout::one, Layout::flat, Layout::hfsdp})
    for (const fsdp_strategy strategy : strategies) all.push_back({layout, strategy});
  for (const Layout layout : {Layout::hsdp, Layout::hosts, Layout::debug})
    for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
      all.push_back({layout, strategy});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Each, GpuOrder, testing::ValuesIn(all_setups()), [](const auto &info) {
  return std::string(layout_names[static_cast<int>(info.param.layout)]) + "Strategy" +
         std::to_string(info.param.strategy);
});

INSTANTIATE_TEST_SUITE_P(Each, GpuDiscard, testing::ValuesIn(strategies));

}  // namespace
