// SPDX-License-Identifier: Apache-2.0
// A graph keeps user objects alive for a library after the library's work was captured into it. They tell NCCL when no
// graph can launch its work any more.
#include <cuda_runtime_api.h>

#include <atomic>

#include "simulated_cuda/call.h"
#include "simulated_cuda/graph.h"
#include "simulated_cuda/runtime.h"

namespace simulated {

struct UserObject {
  void *data;
  cudaHostFn_t destroy;
  std::atomic<unsigned> references;

  void release(unsigned count) {
    if (references.fetch_sub(count) != count) return;
    destroy(data);
    delete this;
  }
};

void add_handle(Nodes &nodes) {
  const std::lock_guard lock(nodes.mutex);
  ++nodes.handles;
}

void drop_handle(Nodes &nodes) {
  std::vector<UserObject *> objects;
  {
    const std::lock_guard lock(nodes.mutex);
    if (--nodes.handles == 0) objects.swap(nodes.objects);
  }
  for (UserObject *object : objects) object->release(1);
}

}  // namespace simulated

using namespace simulated;  // NOLINT: the functions below are C's

cudaError_t CUDARTAPI cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy,
                                           unsigned references, unsigned flags) {
  return call("cudaUserObjectCreate", nothing, [&] {
    if (!object || !destroy || references == 0 || flags != cudaUserObjectNoDestructorSync) return cudaErrorInvalidValue;
    *object = reinterpret_cast<cudaUserObject_t>(new UserObject{data, destroy, references});
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  return call("cudaUserObjectRelease", nothing, [&] {
    if (!object || count == 0) return cudaErrorInvalidValue;
    reinterpret_cast<UserObject *>(object)->release(count);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object, unsigned count,
                                                unsigned flags) {
  return call("cudaGraphRetainUserObject", nothing, [&] {
    const Graph *graph = runtime().graphs.find(handle);
    if (!graph || !object || count == 0 || flags != cudaGraphUserObjectMove) return cudaErrorInvalidValue;
    const std::lock_guard lock(graph->nodes->mutex);
    for (unsigned i = 0; i < count; ++i) graph->nodes->objects.push_back(reinterpret_cast<UserObject *>(object));
    return cudaSuccess;
  });
}
