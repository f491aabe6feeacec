/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded by tests: Julia 1.5 starts no more threads than there are processors; four ranks as threads want four. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <unistd.h>

enum { THREADS = 4 };

long sysconf(int name) {
  static long (*real)(int);
  if (!real) real = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
  const long value = real(name);
  return name == _SC_NPROCESSORS_ONLN && value < THREADS ? THREADS : value;
}
