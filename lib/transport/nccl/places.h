// SPDX-License-Identifier: Apache-2.0
// Where a libnccl may be. Nothing is executed to find out.
#pragma once

#include <string>
#include <vector>

namespace fsdp::transport::nccl {

// The files named libnccl.so* that this process has mapped, each once.
std::vector<std::string> mapped_libraries();
// Where Python's wheels put it, in the environments that the process can see, those that exist only.
std::vector<std::string> wheel_libraries();
// What wheel_libraries looked into, for messages.
std::vector<std::string> python_folders();

}  // namespace fsdp::transport::nccl
