// SPDX-License-Identifier: Apache-2.0
// The transports that UCX may use, as it lists them itself, and which of them need the user's word of trust.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::transport::ucx {

// "tcp/eth0" and so on, from what ucp_context_print_info writes; empty if it writes something else.
std::vector<std::string> transports_of(std::string_view text);
// One of them is TCP, or the list is empty: nobody knows.
bool may_use_tcp(const std::vector<std::string> &transports);
// One of them reaches other hosts.
bool leaves_host(const std::vector<std::string> &transports);

// FSDP_UCX_TCP is "trusted". Throws INVALID_ARGUMENT if it is something else.
bool trusts_tcp();

}  // namespace fsdp::transport::ucx
