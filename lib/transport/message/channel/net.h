// SPDX-License-Identifier: Apache-2.0
// A Net whose messages are channels over one transport.
#pragma once

#include <memory>

#include "transport/message/channel/transport.h"

namespace fsdp::transport::messages {

// chunk_bytes: the largest that the transport carries; read_net_chunk_bytes.
std::unique_ptr<Net> create_net(std::unique_ptr<Transport> transport, uint64_t chunk_bytes);

}  // namespace fsdp::transport::messages
