/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <math.h>
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

static float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
  return code >> 7 ? -magnitude : magnitude;
}

static float scale_value(const fsdp_tensor *scales, uint64_t i) {
  if (scales->dtype == FSDP_FLOAT32) return ((const float *)scales->data)[i];
  const uint8_t code = ((const uint8_t *)scales->data)[i];
  return code == 255 ? NAN : ldexpf(1.0f, code - 127);
}

void device_dequantize(struct device *device, float *out, const struct quantized *weights) {
  (void)device;
  float values[256];
  for (int code = 0; code < 256; ++code) values[code] = e4m3_value((uint8_t)code);
  const uint64_t rows = weights->codes.shape[0], columns = weights->codes.shape[1], across = weights->scales.shape[1];
  const uint8_t *codes = weights->codes.data;
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t column = 0; column < columns; ++column) {
      const uint64_t block = row / weights->block_rows * across + column / weights->block_columns;
      *out++ = values[*codes++] * scale_value(&weights->scales, block);
    }
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
