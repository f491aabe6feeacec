// SPDX-License-Identifier: Apache-2.0
#include "ptx/runtime.h"

#include <cuda_runtime_api.h>

#include <set>
#include <unordered_map>
#include <utility>

#include "ptx/run_kernel.h"

namespace ptx {
namespace {

Module kernels;
std::set<std::string> idle;
std::string fault;

// nvcc puts 8 digits that depend on its options into the names of objects that are local to a file, and does so twice:
// _GLOBAL__N__9e4017bc_ ... _cu_8fb27b9a
std::string without_digest(std::string name) {
  for (const std::string before : {"_GLOBAL__N__", "_cu_"})
    if (const auto at = name.find(before); at != name.npos) name.replace(at + before.size(), 8, 8, '0');
  return name;
}

std::unordered_map<const void *, std::string> &registered() {
  static std::unordered_map<const void *, std::string> names;  // filled before main()
  return names;
}

cudaError_t launch(const cudaLaunchConfig_t &config, const void *function, void *const *arguments) {
  const auto found = registered().find(function);
  const std::string name = found == registered().end() ? "a function that is not registered" : found->second;
  const auto kernel = kernels.find(name);
  try {
    if (kernel == kernels.end()) throw Fault("no PTX of " + name);
    idle.erase(name);
    run_kernel(kernel->second, config.gridDim.x, config.blockDim.x, arguments);
    return cudaSuccess;
  } catch (const Fault &wrong) {
    fault += std::string(wrong.what()) + '\n';
    return cudaErrorLaunchFailure;
  }
}

}  // namespace

void use(Module module) {
  kernels.clear(), idle.clear();
  for (auto &[digested, kernel] : module) {
    const std::string name = without_digest(digested);
    idle.insert(name);
    kernels[name] = std::move(kernel);
  }
}

std::vector<std::string> idle_kernels() { return {idle.begin(), idle.end()}; }
size_t kernel_count() { return kernels.size(); }
std::string take_fault() { return std::exchange(fault, {}); }

}  // namespace ptx

extern "C" {

void **__cudaRegisterFatBinary(void *) {
  static void *handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                            dim3 *, int *) {
  ptx::registered()[function] = ptx::without_digest(name);
}

// The constants are in the PTX, see GlobalConstant.
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

// <<<>>> would call these functions, but the library launches only with cudaLaunchKernelExC.
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return ptx::launch(*config, function, arguments);
}

}  // extern "C"
