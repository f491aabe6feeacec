// SPDX-License-Identifier: Apache-2.0
// Programs that do not call simulated.h can configure the whole process:
//   SIMULATED_CUDA=devices=2,delay_us=50,seed=3,memory_mib=512,strict=1,queues=0,fair_queues=1,word_ns=0,stream_room=0
// An unknown word leaves the process without a device and is reported on standard error.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace simulated {

struct Settings {
  uint64_t devices = 1, delay_us = 0, seed = 0, memory_mib = 16384, strict = 0;
  uint64_t word_ns = 1600;              // as measured on an H100
  uint64_t stream_room = 1024;          // the stream accepts this many pieces of work; 0: any number
  uint64_t fair_queues = 0;             // 1: a new stream gets the queue with the fewest streams
  std::optional<uint64_t> queues = {};  // shared by streams; 0: each has its own; unset: CUDA_DEVICE_MAX_CONNECTIONS
};

// Returns nothing if the text does not have that form.
std::optional<Settings> parse_settings(std::string_view text);
// Returns the settings from the environment, or settings with 0 devices if the environment is not valid.
Settings environment_settings();

}  // namespace simulated
