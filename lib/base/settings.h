// SPDX-License-Identifier: Apache-2.0
// The environment variables of this library, FSDP_*, in one list. No other FSDP_ variable is read
// (tests/tree/tree_test.py). Variables of launchers and of other libraries (RANK, NCCL_*, UCX_*) are read by the code
// that needs them.
#pragma once

#include <span>
#include <string>

namespace fsdp {

struct Setting {
  const char *name;
  const char *otherwise;   // description of the default, for users
  bool is_secret = false;  // its value is not shown
};

std::span<const Setting> settings() noexcept;
// The variable's text, or NULL if the variable is not set. The name must be in the list.
const char *setting(const char *name);
// One line per setting: "FSDP_NET: tcp (environment)", "FSDP_NET_CHECKSUM: none (default)".
std::string describe_settings();

}  // namespace fsdp
