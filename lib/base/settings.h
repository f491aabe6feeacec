// SPDX-License-Identifier: Apache-2.0
// The environment variables of this library, FSDP_*, in one list: no other is read (tests/tree/tree_test.py). Those of
// launchers and of other libraries (RANK, NCCL_*, UCX_*) are read where they are needed.
#pragma once

#include <span>
#include <string>

namespace fsdp {

struct Setting {
  const char *name;
  const char *otherwise;   // what holds where it is not set, for people
  bool is_secret = false;  // its value is not shown
};

std::span<const Setting> settings() noexcept;
// The variable's text; NULL: it is not set. The name is one of the list.
const char *setting(const char *name);
// A line for each: "FSDP_NET: tcp (environment)", "FSDP_NET_CHECKSUM: none (default)".
std::string describe_settings();

}  // namespace fsdp
