// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "chosen_files.h"

int main(int argc, char **argv) {
  testing::InitGoogleTest(&argc, argv);
  return chosen_files::run(argc, argv);
}
