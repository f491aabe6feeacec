// SPDX-License-Identifier: Apache-2.0
// Computes the results of the collectives.
#include <array>
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

// Rounds to nearest even. The tests use no NaN.
uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void save(std::byte *to, DataType type, size_t index, float value) {
  if (type == float32) return (void)std::memcpy(to + index * sizeof value, &value, sizeof value);
  const uint16_t bits = type == float16 ? std::bit_cast<uint16_t>(static_cast<_Float16>(value)) : to_bfloat16(value);
  std::memcpy(to + index * sizeof bits, &bits, sizeof bits);
}

// Rounds a partial sum as a hop does: data travels in the type of the summands.
float sent_on(DataType type, float value) {
  if (type == float32 || state().knob(Knob::round_sums_once)) return value;
  std::array<std::byte, sizeof value> wire;
  save(wire.data(), type, 0, value);
  return load(wire.data(), type, 0);
}

// Returns the rank that sends a chunk first: in a ring, the rank after the one that the chunk is for.
size_t first_of_ring(const Meeting &meeting, DataType type, size_t chunk) {
  const Knob leniency = type == float32 ? Knob::rank_order_sums : Knob::round_sums_once;
  return state().knob(leniency) ? 0 : (chunk + 1) % meeting.launches.size();
}

// `chunk` is the rank that the chunk is for, if every sum consists of that many chunks.
float add_place(const Meeting &meeting, size_t index, size_t place, size_t chunk) {
  const size_t size = meeting.launches.size();
  const DataType type = (*meeting.launches.front())[index].type;
  const size_t start = first_of_ring(meeting, type, chunk);
  float total = 0;
  for (size_t hop = 0; hop < size; ++hop) {
    const Collective &call = (*meeting.launches[(start + hop) % size])[index];
    const float value = load(call.from, type, place);
    total = hop == 0 ? value : sent_on(type, total + value);
  }
  return total;
}

std::vector<std::byte> scatter_sums(const Comm &comm, const Meeting &meeting, size_t index) {
  const auto rank = static_cast<size_t>(comm.rank);
  const Collective &mine = (*meeting.launches[rank])[index];
  std::vector<std::byte> result(mine.count * size_of(mine.type));
  for (size_t i = 0; i < mine.count; ++i)
    save(result.data(), mine.type, i, add_place(meeting, index, rank * mine.count + i, rank));
  return result;
}

std::vector<std::byte> all_sums(const Meeting &meeting, size_t index) {
  const Collective &mine = (*meeting.launches.front())[index];
  std::vector<std::byte> result(mine.count * size_of(mine.type));
  for (size_t i = 0; i < mine.count; ++i)
    save(result.data(), mine.type, i, add_place(meeting, index, i, i * meeting.launches.size() / mine.count));
  return result;
}

std::vector<std::byte> received(const Comm &comm, const Meeting &meeting, size_t index) {
  const Collective *sent = counterpart(comm, meeting, index);
  if (!sent) return {};
  return {sent->from, sent->from + sent->count * size_of(sent->type)};
}

std::vector<std::byte> gather(const Meeting &meeting, size_t index, size_t bytes) {
  std::vector<std::byte> result;
  for (const auto &launch : meeting.launches) {
    const std::byte *from = (*launch)[index].from;
    result.insert(result.end(), from, from + bytes);
  }
  return result;
}

std::vector<std::byte> sent_by(const Meeting &meeting, size_t index, size_t bytes) {
  const auto root = static_cast<size_t>((*meeting.launches.front())[index].root);
  const std::byte *from = (*meeting.launches[root])[index].from;
  return {from, from + bytes};
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
    switch (call.kind) {
      case Kind::all_gather: all.push_back(gather(meeting, i, bytes)); break;
      case Kind::reduce_scatter: all.push_back(scatter_sums(comm, meeting, i)); break;
      case Kind::all_reduce: all.push_back(all_sums(meeting, i)); break;
      case Kind::broadcast: all.push_back(sent_by(meeting, i, bytes)); break;
      case Kind::send: all.emplace_back(); break;
      case Kind::receive: all.push_back(received(comm, meeting, i)); break;
    }
  }
  return all;
}

void store(const Comm &, const std::vector<Collective> &launch, const std::vector<std::vector<std::byte>> &results) {
  for (size_t i = 0; i < launch.size(); ++i)
    if (!results[i].empty()) std::memcpy(launch[i].to, results[i].data(), results[i].size());
}

}  // namespace simulated::nccl
