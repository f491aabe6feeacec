// SPDX-License-Identifier: Apache-2.0
// The main function of tests with ranks that send each other messages, over TCP or UCX (FSDP_NET), on this host's
// loopback device.
#include <gtest/gtest.h>

#include "chosen_files.h"
#include "net_ranks.h"

int main(int argc, char **argv) {
  fsdp::transport::test::use_loopback();
  testing::InitGoogleTest(&argc, argv);
  return chosen_files::run(argc, argv);
}
