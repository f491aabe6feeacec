// SPDX-License-Identifier: Apache-2.0
// At which address of this host a rank listens for messages.
#pragma once

#include <string>

#include "membership/wire/endpoint.h"
#include "transport/names.h"

namespace fsdp::transport::tcp {

// That of FSDP_NET_INTERFACE (an interface's name, or a numeric address), in the family of `address` if it has one;
// else `address` itself, by which this rank reached the rendezvous. Throws INVALID_ARGUMENT naming the interfaces there
// are.
Endpoint find_interface(const std::string &address);

}  // namespace fsdp::transport::tcp
