// SPDX-License-Identifier: Apache-2.0
// The kernel, or a seccomp profile as containers have it, denies system calls to this process.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <stdexcept>

namespace fsdp::transport::test {

// From now on the call with this number fails with EPERM in this thread and in threads that it creates.
inline void deny_call(long number) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{4, program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) != 0)
    throw std::runtime_error("no seccomp filter");
}

struct DeniedCall {
  const char *name;
  long number;
};
inline constexpr DeniedCall needed_calls[] = {{"memfd_create", SYS_memfd_create},
                                              {"pidfd_open", SYS_pidfd_open},
                                              {"madvise", SYS_madvise},
                                              {"getrandom", SYS_getrandom}};

}  // namespace fsdp::transport::test
