// SPDX-License-Identifier: Apache-2.0
// A training program on simulated GPUs that uses a stream of its own for each kind of work, so that only the library
// orders what one of them writes and another reads. One party can be late by more than a collective takes.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "graph.h"

namespace order {

using namespace harness;

// What is late: the caller's streams that read weights, write gradients (all, or one of the two) or update; the
// library's gathers, reduces or outer axis; or everything that rank 1 does.
enum class Late { nobody, readers, writers, writer, updates, gathers, reduces, outer, rank };
inline constexpr Late all_late[] = {Late::readers, Late::writers, Late::writer, Late::updates,
                                    Late::gathers, Late::reduces, Late::outer,  Late::rank};
inline constexpr const char *late_names[] = {"nobody",  "readers", "writers", "writer", "updates",
                                             "gathers", "reduces", "outer",   "rank 1"};

// How the ranks are arranged.
enum class Layout { one, flat, hsdp, hfsdp, hosts, debug };
inline constexpr const char *layout_names[] = {"One", "Flat", "Hsdp", "Hfsdp", "Hosts", "Debug"};

// Compute weights are separate from the main weights, and gradients are in fp32.
Scenario order_scenario(Layout layout, fsdp_strategy strategy);

// The library's streams of one rank, which its seal made on this thread.
class LibraryStreams {
 public:
  LibraryStreams() : before_(simulated::streams_of_this_thread()) {}
  void find();  // after the seal
  void delay(Late late) const;

 private:
  std::vector<cudaStream_t> before_, all_;
  cudaStream_t gathers_ = nullptr, reduces_ = nullptr, outer_ = nullptr;
};

// Everything that a rank's kernels have read, and the weights at the end.
struct Seen {
  std::deque<std::vector<std::byte>> weights;
  Weights last;
};

// Runs one program of several steps, on one stream if `apart` is false. With `discards`, each step follows one that was
// discarded in the middle, with lent gradients and unfinished reduces. Returns the result of each rank.
std::vector<Seen> run_program(const Scenario &setup, bool apart, Late late, bool discards = false);

// Tells where the two results begin to differ; empty if they are equal.
std::string compare(const std::vector<Seen> &expected, const std::vector<Seen> &found);

}  // namespace order
