/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

void device_set_context_options(fsdp_context_options *options) { (void)options; }
struct device *device_create(fsdp_context *context) {
  (void)context;
  return NULL;
}
void device_destroy(struct device *device) { (void)device; }
fsdp_stream device_stream(struct device *device) {
  (void)device;
  return NULL;
}

void *device_allocate(struct device *device, size_t size_bytes) {
  (void)device;
  return check_allocate(size_bytes);
}
void device_free(struct device *device, void *memory) {
  (void)device;
  free(memory);
}

void device_upload(struct device *device, void *to, const void *from, size_t size_bytes) {
  (void)device;
  memcpy(to, from, size_bytes);
}
void device_download(struct device *device, void *to, const void *from, size_t size_bytes) {
  (void)device;
  memcpy(to, from, size_bytes);
}
void device_zero(struct device *device, void *memory, size_t size_bytes) {
  (void)device;
  memset(memory, 0, size_bytes);
}

void device_widen_bfloat16(struct device *device, float *out, const uint16_t *in, uint64_t count) {
  (void)device;
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = (uint32_t)in[i] << 16;
    memcpy(&out[i], &bits, sizeof bits);
  }
}

size_t device_parallel_heads(size_t heads) {
  (void)heads;
  return 1;
}

int device_has_graphs(void) { return 0; }
void device_capture_begin(struct device *device) { (void)device; }
struct device_graph *device_capture_end(struct device *device) {
  (void)device;
  return NULL;
}
void device_launch(struct device *device, struct device_graph *graph) { (void)device, (void)graph; }
void device_destroy_graph(struct device_graph *graph) { (void)graph; }
