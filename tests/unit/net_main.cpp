// SPDX-License-Identifier: Apache-2.0
// Of tests whose ranks send each other messages, over TCP or UCX (FSDP_NET): on this host's loopback device.
#include <gtest/gtest.h>

#include "net_ranks.h"

int main(int argc, char **argv) {
  fsdp::comm::test::use_loopback();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
