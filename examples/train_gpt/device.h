/* SPDX-License-Identifier: Apache-2.0 */
/* Where the math runs: its memory, its order of work. device_host.c is this process's cores, device.cu of
 * train_gpt_cuda a GPU. */
#ifndef TRAIN_GPT_DEVICE_H
#define TRAIN_GPT_DEVICE_H

#include <fsdp.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct device; /* one rank's; NULL on the host */

/** What a context must be created with so that libfsdp works where the math does. */
void device_set_context_options(fsdp_context_options *options);
/** Creates the device of the context's rank; on the host there is none, and NULL is returned. Ends the program if there
 * is no GPU. */
struct device *device_create(fsdp_context *context);
void device_destroy(struct device *device);
/** The stream of all the math, for libfsdp's calls; NULL on the host. */
fsdp_stream device_stream(struct device *device);

/** Zeroed memory for the math; ends the program if there is none. */
void *device_allocate(struct device *device, size_t size_bytes);
void device_free(struct device *device, void *memory);

/** Copies to the math's memory, in the order of its work; from may be written again on return. */
void device_upload(struct device *device, void *to, const void *from, size_t size_bytes);
/** Copies from the math's memory; waits for all its work so far. */
void device_download(struct device *device, void *to, const void *from, size_t size_bytes);
void device_zero(struct device *device, void *memory, size_t size_bytes);
/** out = in as fp32 */
void device_widen_bfloat16(struct device *device, float *out, const uint16_t *in, uint64_t count);
/** A matrix of E4M3 codes, and fp32 or E8M0 scales of blocks of it. */
struct quantized {
  fsdp_tensor codes, scales;
  uint64_t block_rows, block_columns;
};
/** out = codes times scales */
void device_dequantize(struct device *device, float *out, const struct quantized *weights);

/** Heads whose attention is in work at once, each with a square of scratch. */
size_t device_parallel_heads(size_t heads);

/**
 * A graph: what the math and libfsdp enqueue between the two calls is recorded instead of run. On the host there is
 * none: device_has_graphs is 0.
 */
struct device_graph;
int device_has_graphs(void);
void device_capture_begin(struct device *device);
struct device_graph *device_capture_end(struct device *device);
void device_launch(struct device *device, struct device_graph *graph);
void device_destroy_graph(struct device_graph *graph);

#ifdef __cplusplus
}
#endif

#endif
