// SPDX-License-Identifier: Apache-2.0
// What the kernel must allow to every process of a job. A seccomp profile or an older kernel may deny it to one rank
// alone, while the others would wait for that rank until their timeout.
#pragma once

#include "membership/job.h"

namespace fsdp::membership {

// Throws if the kernel denies memfd_create, pidfd_open, madvise or getrandom to this process, and says which.
void check_kernel();
// The same, for a rank that has not met the others: before it throws it joins them and tells them why it gives up.
void check_kernel(const WorldOptions &options, const Waiter &waiter);

}  // namespace fsdp::membership
