/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels are started. The tests compile the same sources without nvcc, for a GPU simulated by threads. */
#ifndef TRAIN_GPT_CUDA_LAUNCH_H
#define TRAIN_GPT_CUDA_LAUNCH_H

#ifdef __CUDACC__
#define LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<(blocks), (threads), 0, (stream)>>>(__VA_ARGS__)
#else
#include "launch_simulated.h"
#endif

#endif
