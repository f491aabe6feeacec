// SPDX-License-Identifier: Apache-2.0
// Whether a process is writing its core. Until that is written, for minutes where there is much memory, it neither
// beats nor ends: its pidfd says that it lives, and its connections stay open.
#pragma once

#include "base/fd.h"

namespace fsdp::membership {

// Of a pidfd: a number may be of another namespace, or of a later process. False also where nobody tells: before Linux
// 4.15, or if /proc shows the process to its own user alone. Two files are read. proc: where it is mounted.
bool is_dumping_core(const Fd &process, const char *proc = "/proc") noexcept;

}  // namespace fsdp::membership
