// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime over host threads, for tests without a GPU. Tests control it and query it with these functions. The
// CUDA functions themselves are declared in the toolkit's cuda_runtime_api.h. README.md beside this file says where it
// is stricter or looser than the real one. It shows logic, order and bits. It says nothing about speed or about
// hardware.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simulated_cuda/enqueue.h"

namespace simulated {

inline constexpr int max_devices = 8;

// Returns to the state of a process that has not called CUDA: one device, no planned faults, counters at zero, no
// memory and no handles. Queued work is dropped. No other thread may be in a CUDA call.
void reset();

void set_device_count(int count);  // 0 to 8; 0: CUDA calls return cudaErrorNoDevice. This call resets everything first.
void set_queues(uint64_t count);   // shared by streams; 0: each has its own. Resets like simulate_devices
void set_fair_queues(bool fair);   // new streams get the queues with the fewest streams; at first random ones
void set_device_memory(uint64_t bytes);  // of each device; beyond it: cudaErrorMemoryAllocation. 16 GiB at first
void set_fabric(bool allowed);           // allows memory with fabric handles; the default is CUDA_ERROR_NOT_PERMITTED
void set_files(bool allowed);            // ... with descriptors of files; allowed at first
void set_compute_capability(int major);  // of all devices; 9 at first
void set_slices(int of_gpu);             // this many adjacent devices are slices (MIG) of one GPU; 1 at first
void set_peers(bool peers);              // devices may access each other's memory; true at first
void set_strict(
    bool strict);  // cudaFree and cudaFreeHost do not wait for the device's work, so that pending use faults

// --- time ---

// Pauses for 0 to longest_us before each piece of work of a stream and each node of a graph. 0: no pause.
void set_delay(uint32_t longest_us, uint64_t seed);

// Adds a pause before each piece of work of this stream only, so that a test notices work that does not wait for it. 0:
// no pause.
void set_stream_delay(cudaStream_t stream, uint32_t us);
// Returns whether the stream has work to do but waits for other work, a value in memory, or the end of a Hold.
bool waits(cudaStream_t stream);
// Returns the streams that the calling thread has created and that still exist, oldest first. Streams that a library
// created in a call are included.
std::vector<cudaStream_t> streams_of_this_thread();

// Sets how long a stream takes to write a word (cuStreamWriteValue). The default is 1,600.
void set_word_cost(uint32_t ns);

// A stream accepts this many pieces of unfinished work; a thread that adds more waits. 0: any number. The default is
// 1,024.
void set_stream_room(uint64_t pieces);

// While a Hold exists, no piece of work starts, so that a test notices code that did not wait for work.
class Hold {
 public:
  Hold();
  ~Hold();
  Hold(const Hold &) = delete;
  Hold &operator=(const Hold &) = delete;
};

// --- failures ---

// Makes the nth call from now on (1: the next; 0: every one) of the named function return the error and do nothing.
// Examples of names are "cudaMalloc" and "cuMemCreate"; kernel launches are "cudaLaunchKernel". For driver functions
// the error is a CUresult.
void fail_call(const char *name, uint64_t nth, int error);

// The nth kernel from now on (1: the next) does not run, and its device fails with the error, as after an illegal
// access. Every later call that uses the device returns the error.
void fail_kernel(uint64_t nth, cudaError_t error);

// A kernel or host function calls this to fail the device of its stream.
void fail_device(cudaError_t error);

// --- counters ---

uint64_t calls(const char *name);  // counts since the last reset, and includes calls that failed
void reset_calls();
uint64_t kernels();  // enqueued or captured with enqueue()
// Counts asynchronous copies between pageable host memory and a device, which the real runtime stages or synchronizes
// without telling the caller.
uint64_t pageable_copies();
uint64_t allocated_bytes();  // bytes on all devices that are allocated now
uint64_t pinned_bytes();     // page-locked bytes of cudaHostAlloc and cudaHostRegister that exist now
uint64_t live_handles();     // events, and streams that are not ordered with the legacy stream

// Counts calls on a stream, an event or memory of a device while another device was current. Some of them are also
// errors: launches, cuStreamWriteValue32, and records of events of another device than the stream's.
uint64_t foreign_calls();
// Counts calls into the runtime by threads without a context; each call gave its thread one.
uint64_t implicit_contexts();

// --- questions ---

bool is_device(const void *pointer, size_t bytes = 1);  // all of the range lies in one existing allocation of a device
bool is_pinned(const void *pointer, size_t bytes = 1);  // all of the range lies in page-locked host memory
bool share_queue(cudaStream_t one, cudaStream_t other);
int device_of(const void *pointer);  // returns -1 if the address belongs to no device

}  // namespace simulated
