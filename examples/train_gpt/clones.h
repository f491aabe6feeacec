/* SPDX-License-Identifier: Apache-2.0 */
/* Loops that the compiler makes for AVX-512, AVX2 and SSE2. The one that fits the processor runs; all give the same
 * bits, because products and sums are not contracted (-std=c99). */
#ifndef TRAIN_GPT_CLONES_H
#define TRAIN_GPT_CLONES_H

/* Sanitizers are not ready when the loader chooses. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#endif
