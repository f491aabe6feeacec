// SPDX-License-Identifier: Apache-2.0
// Places the tests' models on the host or, with FSDP_TEST_DEVICE=cuda, on the GPU of the process's CUDA runtime, which
// may be simulated. The test programs are the same, because the runtime's functions are found by name.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp.h"

namespace harness {

bool on_gpu();
// Sets the context's options for the device on which the tests run, unless they name a device already.
fsdp_context_options place(fsdp_context_options options);
// ... and a model's: mapped weights are copied ones there.
fsdp_model_options place(fsdp_model_options options);

// The calling thread's own stream; NULL on the host. Ranks that are threads of one process and share a GPU must not use
// the stream NULL. It is one stream for all of them, so the work of one rank would wait behind work of another rank
// that waits for it.
fsdp_stream stream();
// Returns whether there is a GPU for each rank that is a thread; otherwise the ranks share the current one. use_gpu
// makes a rank's GPU the calling thread's current one.
bool has_gpu_for_each(uint32_t ranks);
void use_gpu(uint32_t rank);
// From now on the calling thread makes everything on the host, whatever the environment says.
void stay_on_host(bool host);
// Copies from the models' memory to host memory, in the order of stream(). The copy is complete on return.
void copy_out(void *to, const void *from, uint64_t bytes);
// The elements as floats.
std::vector<float> load_elements(const void *data, fsdp_dtype dtype, uint64_t count);
void store_elements(void *data, fsdp_dtype dtype, const std::vector<float> &values);

// Floats where the library can read them, until the end of the scope.
class Placed {
 public:
  explicit Placed(const std::vector<float> &values);
  ~Placed();
  Placed(const Placed &) = delete;
  Placed &operator=(const Placed &) = delete;
  const void *data() const { return data_; }

 private:
  const void *data_;
  uint64_t bytes_;
  void *owned_ = nullptr;
};

}  // namespace harness
