// SPDX-License-Identifier: Apache-2.0
// Tests how NCCL is found. It is a program of its own, because opened libraries stay open. The tests run in the order
// of this file.
#include <unistd.h>

#include <filesystem>

#include "nccl_ranks.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::test {
namespace {

namespace fs = std::filesystem;

// Makes copies of the simulated NCCL under the name of the real one.
class NcclLibrary : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = fs::temp_directory_path() / ("fsdp-nccl-" + std::to_string(::getpid()));
    copy_to("one");
    copy_to("environment/lib/python3.12/site-packages/nvidia/nccl/lib");
    ::unsetenv("FSDP_NCCL_LIBRARY");
    ::unsetenv("PYTHONPATH");
  }
  static void TearDownTestSuite() { fs::remove_all(folder_); }
  static std::string copy_to(const std::string &where) {
    fs::create_directories(folder_ / where);
    const fs::path file = folder_ / where / "libnccl.so.2";
    fs::copy_file(SIMULATED_NCCL, file, fs::copy_options::skip_existing);
    return fs::canonical(file).string();
  }
  static fs::path folder_;
};
fs::path NcclLibrary::folder_;

TEST_F(NcclLibrary, WhatCannotBeLoadedIsNamed) {
  const std::string missing = folder_ / "none" / "libnccl.so.2";
  ::setenv("FSDP_NCCL_LIBRARY", missing.c_str(), 1);
  const Error error = error_of([] { nccl::load_library(); });
  EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
  EXPECT_NE(error.message.find("FSDP_NCCL_LIBRARY cannot be loaded; " + missing), std::string::npos) << error.message;
  ::setenv("FSDP_NCCL_LIBRARY", "libm.so.6", 1);
  EXPECT_NE(error_of([] { nccl::load_library(); }).message.find("has no ncclGetVersion"), std::string::npos);
  ::unsetenv("FSDP_NCCL_LIBRARY");
}

TEST_F(NcclLibrary, APythonPackageHasIt) {
  ::setenv("VIRTUAL_ENV", (folder_ / "environment").c_str(), 1);
  const auto library = nccl::load_library();
  EXPECT_EQ(library->path, copy_to("environment/lib/python3.12/site-packages/nvidia/nccl/lib"));
  EXPECT_EQ(library->found, "of a Python package");
  EXPECT_EQ(nccl::version_text(library->version), "2.32.3");
  EXPECT_TRUE(library->others.empty());
  ::unsetenv("VIRTUAL_ENV");
}

TEST_F(NcclLibrary, OneThatIsLoadedComesFirst) {
  const auto library = nccl::load_library();
  EXPECT_EQ(library->found, "already loaded");
  EXPECT_EQ(library->path, copy_to("environment/lib/python3.12/site-packages/nvidia/nccl/lib"));
}

TEST_F(NcclLibrary, TwoOfThemAreWarnedOf) {
  const std::string one = copy_to("one");
  ::setenv("FSDP_NCCL_LIBRARY", one.c_str(), 1);
  simulated::set_device_count(1);
  for (const Error &error : run_ranks({1}, [&](NcclRank &mine) {
         const auto notes = mine.team->notes();
         ASSERT_EQ(notes.size(), 2U);
         EXPECT_EQ(notes[1].level, FSDP_LOG_WARNING);
         EXPECT_NE(notes[1].text.find("two NCCLs, " + one + " and " + folder_.string()), std::string::npos)
             << notes[1].text;
       }))
    EXPECT_EQ(error.message, "");
}

TEST_F(NcclLibrary, AnOldOneIsRefused) {
  ::setenv("FSDP_NCCL_LIBRARY", SIMULATED_NCCL, 1);
  simulated::set_device_count(2);
  control().set(Knob::version, 21803);
  for (const Error &error : run_ranks({2}, [](NcclRank &) {})) {
    EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
    EXPECT_NE(error.message.find("is version 2.18.3; 2.19.0 or later is needed"), std::string::npos) << error.message;
  }
  control().reset();
}

}  // namespace
}  // namespace fsdp::transport::test
