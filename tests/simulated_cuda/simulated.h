// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime over host threads, for tests where no GPU is: how tests control it and ask what happened. The CUDA
// functions themselves are declared in the toolkit's cuda_runtime_api.h; README.md beside this file says where it is
// stricter or looser than the real one. It shows logic, order and bits. It says nothing about speed or about hardware.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simulated_cuda/enqueue.h"

namespace simulated {

inline constexpr int max_devices = 8;

// Back to the state of a process that has not called CUDA: one device, no faults planned, counters zero, all memory and
// all handles gone. Work that is still queued is dropped. No other thread may be in a CUDA call.
void reset();

void set_device_count(int count);  // 0 to 8; 0: CUDA calls return cudaErrorNoDevice. Takes effect with a reset inside.
void set_queues(uint64_t count);   // that streams share; 0: each has its own. With a reset inside, as above
void set_fair_queues(bool fair);   // the next streams get the queues with the fewest streams; at first any
void set_device_memory(uint64_t bytes);  // of each device; more than that: cudaErrorMemoryAllocation. 16 GiB at first
void set_fabric(bool allowed);           // memory with handles for the fabric; at first it is CUDA_ERROR_NOT_PERMITTED
void set_files(bool allowed);            // ... for descriptors of files; at first they are made
void set_compute_capability(int major);  // of all devices; 9 at first
void set_slices(int of_gpu);             // so many neighbouring devices are slices (MIG) of one GPU; 1 at first
void set_peers(bool peers);              // may devices access each other's memory? At first they may
void set_strict(
    bool strict);  // cudaFree and cudaFreeHost do not wait for the device's work, so that pending use faults

// --- time ---

// Before each piece of work of a stream, and each node of a graph, a pause of 0 to longest_us. 0: none.
void set_delay(uint32_t longest_us, uint64_t seed);

// Before each piece of work of this stream, and of no other, a pause of that long more: work that does not wait for it
// shows. 0: none.
void set_stream_delay(cudaStream_t stream, uint32_t us);
// Does the stream wait now, with work to do: for other work, a value in memory, or the end of a Hold?
bool waits(cudaStream_t stream);
// The streams that the calling thread has created and that still exist, oldest first: also those that a library made in
// a call.
std::vector<cudaStream_t> streams_of_this_thread();

// What a word that a stream writes (cuStreamWriteValue) costs it; 1,600 at first.
void set_word_cost(uint32_t ns);

// A stream takes so many pieces of work that are not done, and a thread that brings more waits. 0: any number; 1,024 at
// first.
void set_stream_room(uint64_t pieces);

// While one exists, no piece of work starts: what was not waited for shows.
class Hold {
 public:
  Hold();
  ~Hold();
  Hold(const Hold &) = delete;
  Hold &operator=(const Hold &) = delete;
};

// --- failures ---

// The nth call from now on (1: the next; 0: every one) of the function of that name ("cudaMalloc", "cuMemCreate";
// kernel launches are "cudaLaunchKernel") returns the error (a CUresult for driver functions) and does nothing.
void fail_call(const char *name, uint64_t nth, int error);

// The nth kernel from now on (1: the next) does not run; the device fails with the error, as after an illegal access:
// every later call that uses the device returns it.
void fail_kernel(uint64_t nth, cudaError_t error);

// From inside a kernel or host function: the device of the stream it runs on fails.
void fail_device(cudaError_t error);

// --- counters ---

uint64_t calls(const char *name);  // since the last reset, those that failed too
void reset_calls();
uint64_t kernels();  // enqueued or captured with enqueue()
// Asynchronous copies between pageable host memory and a device: the real ones stage or synchronize behind the caller's
// back.
uint64_t pageable_copies();
uint64_t allocated_bytes();  // of all devices, alive now
uint64_t pinned_bytes();     // page-locked, of cudaHostAlloc and of cudaHostRegister, alive now
uint64_t live_handles();     // events, and streams that are not ordered with the legacy stream

// Calls on a stream, an event or memory of a device while another one was the thread's current device. Some of them are
// errors besides (launches, cuStreamWriteValue32, records of events of another device than the stream's).
uint64_t foreign_calls();
// Calls into the runtime by threads without a context, which each gave its thread one.
uint64_t implicit_contexts();

// --- questions ---

bool is_device(const void *pointer, size_t bytes = 1);  // all of it in one live allocation of a device
bool is_pinned(const void *pointer, size_t bytes = 1);  // all of it in page-locked host memory
bool share_queue(cudaStream_t one, cudaStream_t other);
int device_of(const void *pointer);  // -1: not of a device

}  // namespace simulated
