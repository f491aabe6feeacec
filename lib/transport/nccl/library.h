// SPDX-License-Identifier: Apache-2.0
// NCCL, found when the first team needs it: this library loads where it is missing. It stays loaded: it does not bear
// being unloaded.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/nccl/abi.h"

namespace fsdp::transport::nccl {

struct Library {
  // The first with ncclCommRegister, and with configurations that NCCL reads up to splitShare. Older ones were not
  // looked at.
  static constexpr int oldest = version_code(2, 19);
  static constexpr int windows = version_code(2, 27);
  static constexpr int windows_abort = version_code(2, 29, 7);  // kernels over windows notice an abort
  static constexpr int copy_engines = version_code(2, 28);
  static constexpr int copies_unasked = version_code(2, 29, 2);  // large gathers over windows, on some GPUs
  // A window that cannot be registered does no harm to a communicator that blocks: before, NCCL set its flag of being
  // aborted, and told nobody.
  static constexpr int windows_fail_alone = version_code(2, 28);
  static constexpr int blocks_of_switches = version_code(2, 27);  // nvlsCTAs
  static constexpr int ranks_share_gpu = version_code(2, 30, 3);
  // A parent's abort does not touch what a thread launches on its child: before, both used the thread's one group.
  static constexpr int children_block = version_code(2, 26, 2);
  static constexpr int launch_order_by_environment = version_code(2, 26);
  static constexpr int launch_order_in_config = version_code(2, 31);

#define FSDP_NCCL_MEMBER(name, ...) FunctionPointer<__VA_ARGS__>::type name = nullptr;
  FSDP_NCCL_FUNCTIONS(FSDP_NCCL_MEMBER)
  FSDP_NCCL_LATER_FUNCTIONS(FSDP_NCCL_MEMBER)
#undef FSDP_NCCL_MEMBER
  int version = 0;
  std::string path;                 // the file
  std::string found;                // how: "named by FSDP_NCCL_LIBRARY"
  std::vector<std::string> others;  // further NCCLs in this process

  bool since(int code) const { return version >= code; }
};

std::string version_text(int code);
// Throws UNSUPPORTED that says where it looked.
std::shared_ptr<const Library> load_library();

}  // namespace fsdp::transport::nccl
