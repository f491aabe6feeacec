// SPDX-License-Identifier: Apache-2.0
// How long a wait sleeps before it looks again whether it should go on.
#pragma once

namespace fsdp {

inline constexpr int slice_ms = 20;

}  // namespace fsdp
