// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fsdp {

// What a rank may do with pages of memory that ranks share.
enum class Access { none, read, read_write };

// How a rank shows such memory to its caller: in pages that a write faults in, or in pages that are copied when they
// are written, so that only this view changes.
enum class View { read_only, copy_on_write };

}  // namespace fsdp
