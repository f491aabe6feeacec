// SPDX-License-Identifier: Apache-2.0
#include "chosen_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

namespace chosen_files {
namespace {

constexpr std::string_view option = "--files=";

std::set<std::string> split(std::string_view names) {
  std::set<std::string> found;
  while (!names.empty()) {
    const size_t end = std::min(names.find(','), names.size());
    found.emplace(names.substr(0, end));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return found;
}

std::string file_of(const testing::TestInfo &test) { return std::filesystem::path(test.file()).filename(); }

// Excludes what is in other files. `wanted` loses the files that have tests.
std::string exclusions(std::set<std::string> &wanted) {
  const std::set<std::string> files = wanted;
  const testing::UnitTest &all = *testing::UnitTest::GetInstance();
  std::string excluded;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite &suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo &test = *suite.GetTestInfo(t);
      wanted.erase(file_of(test));
      if (!files.contains(file_of(test))) excluded += std::string(":") + suite.name() + "." + test.name();
    }
  }
  return excluded;
}

// 0, or what main() ends with.
int choose(int argc, char **argv) {
  for (int a = 1; a < argc; ++a) {
    const std::string_view argument = argv[a];
    if (!argument.starts_with(option)) {
      std::fprintf(stderr, "unknown argument '%s' (known: --files=FILE,... and those of GoogleTest)\n", argv[a]);
      return 2;
    }
    std::set<std::string> wanted = split(argument.substr(option.size()));
    const std::string excluded = exclusions(wanted);
    if (!wanted.empty()) {
      std::fprintf(stderr, "%s: none of this program's tests is in it\n", wanted.begin()->c_str());
      return 2;
    }
    std::string filter = GTEST_FLAG_GET(filter);
    if (filter.empty()) continue;  // lets no test through; before exclusions it would be all of them
    if (filter.find('-') == std::string::npos) filter += "-";
    GTEST_FLAG_SET(filter, filter + excluded);
  }
  return 0;
}

}  // namespace

int run(int argc, char **argv) {
  if (const int status = choose(argc, argv)) return status;
  const int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() > 0 || GTEST_FLAG_GET(list_tests)) return status;
  std::fprintf(stderr, "no test of the chosen files has a name that the filter lets through\n");
  return 2;
}

}  // namespace chosen_files
