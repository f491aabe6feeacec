// SPDX-License-Identifier: Apache-2.0
// Tests which CUDA errors end the process's use of the GPU, as the toolkit's header says.
#include "device/cuda/driver.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>

namespace fsdp::device::cuda {
namespace {

struct Documented {
  int code;
  std::string comment;
};

// Returns the errors of driver_types.h with the comments before them, one line each.
std::map<std::string, Documented> read_errors() {
  std::ifstream file(std::string(CUDA_INCLUDE) + "/driver_types.h");
  std::stringstream text;
  text << file.rdbuf();
  const std::string header = text.str();
  const size_t begin = header.find("enum __device_builtin__ cudaError"), end = header.find("};", begin);
  const std::regex entry(R"(/\*\*((?:[^*]|\*(?!/))*)\*/\s*(cudaError\w+)\s*=\s*(\d+))");
  const std::regex between(R"(\s+(\*\s+)?)");
  std::map<std::string, Documented> errors;
  const std::string all = begin == std::string::npos ? "" : header.substr(begin, end - begin);
  for (std::sregex_iterator at(all.begin(), all.end(), entry), none; at != none; ++at)
    errors[(*at)[2]] = {std::stoi((*at)[3]), std::regex_replace((*at)[1].str(), between, " ")};
  return errors;
}

TEST(CudaError, WhatEndsTheProcessIsSticky) {
  const auto errors = read_errors();
  ASSERT_GT(errors.size(), 80u) << CUDA_INCLUDE;
  int found = 0;
  for (const auto &[name, documented] : errors) {
    if (documented.comment.find("terminated and relaunched") == std::string::npos) continue;
    ++found;
    EXPECT_TRUE(is_sticky(static_cast<cudaError_t>(documented.code))) << name << " (" << documented.code << ")";
  }
  EXPECT_GE(found, 10);
}

// The header does not say this about these errors, but after one of them every later call on the GPU returns it.
TEST(CudaError, WhatIsStickyInPracticeIsToo) {
  for (const cudaError_t code :
       {cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorContextIsDestroyed, cudaErrorUnknown})
    EXPECT_TRUE(is_sticky(code)) << cudaGetErrorName(code);
}

TEST(CudaError, OtherErrorsLeaveTheDeviceUsable) {
  for (const cudaError_t code :
       {cudaSuccess, cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorNotReady, cudaErrorLaunchOutOfResources,
        cudaErrorCooperativeLaunchTooLarge, cudaErrorStreamCaptureInvalidated, cudaErrorHostMemoryAlreadyRegistered})
    EXPECT_FALSE(is_sticky(code)) << cudaGetErrorName(code);
}

}  // namespace
}  // namespace fsdp::device::cuda
