// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "harness.h"

namespace harness {

// Trains in the memory that was planned, and says what is not the reference's.
inline std::string train_as_planned(const Scenario &setup, bool processes = false) {
  const auto outcomes = processes ? train_processes(setup) : train_threads(setup);
  for (const Outcome &outcome : outcomes)
    for (int role = 0; role <= last_role; ++role)
      EXPECT_EQ(outcome.memory.role_bytes[role], outcome.stats.allocated_bytes[role]) << "role " << role;
  return difference(setup, outcomes);
}

}  // namespace harness
