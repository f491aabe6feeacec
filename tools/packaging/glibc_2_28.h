/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library takes from a newer glibc than 2.28, made of what 2.28 has: for the wheel of manylinux.sh, which
 * gives it to every file by -include.
 */
#ifndef FSDP_GLIBC_2_28_H
#define FSDP_GLIBC_2_28_H

#include <features.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3; its headers there are older */
#endif

#if !__GLIBC_PREREQ(2, 30)
static inline pid_t fsdp_gettid(void) { return (pid_t)syscall(SYS_gettid); }
#define gettid fsdp_gettid
#endif

#if !__GLIBC_PREREQ(2, 32)
/* In the locale of the thread, as strerrordesc_np is in none: libfsdp sets none. */
static inline const char *fsdp_describe_errno(int code) {
  static __thread char text[128];
  return strerror_r(code, text, sizeof text);
}
#define strerrordesc_np fsdp_describe_errno
#endif

#endif
