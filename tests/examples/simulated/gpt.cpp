// SPDX-License-Identifier: Apache-2.0
// Compiles train_gpt_cuda's sources for the simulated GPU.
#include "launch_simulated.h"

#include "../../../examples/train_gpt_cuda/attention.cu"
#include "../../../examples/train_gpt_cuda/block.cu"
#include "../../../examples/train_gpt_cuda/device.cu"
#include "../../../examples/train_gpt_cuda/embedding.cu"
#include "../../../examples/train_gpt_cuda/head.cu"
#include "../../../examples/train_gpt_cuda/linear.cu"
#include "../../../examples/train_gpt_cuda/norm.cu"
