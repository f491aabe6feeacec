// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fsdp::comm {

// What a rank may do with pages of memory that ranks share.
enum class Access { none, read, read_write };

}  // namespace fsdp::comm
