// SPDX-License-Identifier: Apache-2.0
// What programs that do not call simulated.h may set, for the whole process:
//   SIMULATED_CUDA=devices=2,delay_us=50,seed=3,memory_mib=512,strict=1,queues=0,fair_queues=1,word_ns=0,stream_room=0
// A word that is not one of these leaves the process without a device, and says so on standard error.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace simulated {

struct Settings {
  uint64_t devices = 1, delay_us = 0, seed = 0, memory_mib = 16384, strict = 0;
  uint64_t word_ns = 1600;              // as measured on an H100
  uint64_t stream_room = 1024;          // pieces of work that a stream takes; 0: any number
  uint64_t fair_queues = 0;             // 1: a new stream gets the queue with the fewest
  std::optional<uint64_t> queues = {};  // that streams share; 0: each has its own; nothing: CUDA_DEVICE_MAX_CONNECTIONS
};

// Nothing: the text is not of that form.
std::optional<Settings> parse_settings(std::string_view text);
// The settings that the environment gives; with 0 devices if the environment cannot be read.
Settings environment_settings();

}  // namespace simulated
