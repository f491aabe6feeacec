// SPDX-License-Identifier: Apache-2.0
// Test programs hold the files of a room, since most of a compiler's time goes into what they include. Each test of the
// build runs some of the files: `PROGRAM --files=a_test.cpp,b_test.cpp [--gtest_filter=...]`.
#pragma once

namespace chosen_files {

// Returns the exit status of main(). Call it after InitGoogleTest, which removes its own arguments. If no test is
// chosen, that is an error.
int run(int argc, char **argv);

}  // namespace chosen_files
