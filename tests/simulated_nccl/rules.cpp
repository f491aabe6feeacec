// SPDX-License-Identifier: Apache-2.0
// Checks rules that NCCL requires of its callers but does not check itself.
#include <algorithm>
#include <functional>

#include "simulated_nccl/state.h"

namespace simulated::nccl {
namespace {

// Messages are compared with those of the peer.
bool same(const Collective &a, const Collective &b) {
  if (is_message(a) && is_message(b)) return true;
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.operation == b.operation && a.root == b.root;
}

bool overlap(const std::byte *a, size_t a_bytes, const std::byte *b, size_t b_bytes) {
  return std::less<>()(a, b + b_bytes) && std::less<>()(b, a + a_bytes);
}

// In place means exactly one address.
void inspect_places(const Comm &comm, const Collective &call) {
  const size_t piece = call.count * size_of(call.type), size = static_cast<size_t>(comm.clique->size);
  const size_t own = static_cast<size_t>(comm.rank) * piece;
  if (call.kind == Kind::all_gather) {
    if (call.from == call.to + own)
      ++state().count(Count::in_place_gathers);
    else if (overlap(call.from, piece, call.to, piece * size))
      state().breach(&comm, "an all_gather overlaps itself");
  } else if (call.kind == Kind::reduce_scatter) {
    if (call.to == call.from + own)
      ++state().count(Count::in_place_reduces);
    else if (overlap(call.to, piece, call.from, piece * size))
      state().breach(&comm, "a reduce_scatter overlaps itself");
  }
}

struct Bytes {
  const std::byte *at;
  size_t count;
};

Bytes bytes_of(const Collective &message) {
  return {message.kind == Kind::send ? message.from : message.to, message.count * size_of(message.type)};
}

void inspect_message(const Comm &comm, const std::vector<Collective> &launch, size_t index, const Collective &theirs) {
  const Collective &mine = launch[index];
  if (theirs.count != mine.count || theirs.type != mine.type)
    state().breach(&comm, "a message that its peer calls with another size");
  if (mine.kind == Kind::send) return (void)++state().count(Count::messages);
  const Bytes to = bytes_of(mine);
  for (size_t i = 0; i < launch.size(); ++i)
    if (const Bytes other = i != index && is_message(launch[i]) ? bytes_of(launch[i]) : Bytes{};
        overlap(to.at, to.count, other.at, other.count))
      state().breach(&comm, "a message is received where another one of the launch is");
}

void inspect_message(const Comm &comm, const Meeting &meeting, size_t index) {
  const std::vector<Collective> &launch = *meeting.launches[static_cast<size_t>(comm.rank)];
  const Collective *theirs = counterpart(comm, meeting, index);
  if (!theirs) return state().breach(&comm, "a message that its peer knows nothing of");
  inspect_message(comm, launch, index, *theirs);
}

const Comm *comm_of(const Comm &comm, size_t rank) {
  for (const auto &[key, other] : state().comms)
    if (other->clique == comm.clique && other->rank == static_cast<int>(rank)) return other.get();
  return nullptr;
}

// Returns -1 if the memory lies in no window.
int64_t window_offset(const Comm &comm, const std::byte *data) {
  for (const auto &window : comm.windows)
    if (data >= window->region.data && data < window->region.data + window->region.bytes)
      return data - window->region.data;
  return -1;
}

bool in_buffer(const Comm &comm, const std::byte *data) {
  for (const auto &buffer : comm.buffers)
    if (data >= buffer->data && data < buffer->data + buffer->bytes) return true;
  return false;
}

// Before 2.24, ranks of one process access each other's memory by its address, however it was allocated.
void inspect_access(const Comm &comm, const Collective &call) {
  if (version() < version_code(2, 24) && (call.readers >> comm.device & 1) == 0)
    state().breach(&comm, "a GPU reaches into memory of another one that it has no access to");
}

// Memory that peers read or write must lie at the same offset of every rank's window, or in no window.
void inspect_windows(const Comm &comm, const Meeting &meeting, size_t index) {
  const auto shared = [](const Collective &call) { return call.kind == Kind::all_gather ? call.to : call.from; };
  const Collective &mine = (*meeting.launches[static_cast<size_t>(comm.rank)])[index];
  const int64_t offset = window_offset(comm, shared(mine));
  if (offset >= 0) ++state().count(Count::registered_collectives);
  if (in_buffer(comm, shared(mine))) ++state().count(Count::buffered_collectives);
  if (mine.kind == Kind::broadcast) return;
  for (size_t r = 0; r < meeting.launches.size(); ++r) {
    const Comm *other = comm_of(comm, r);
    if (other && window_offset(*other, shared((*meeting.launches[r])[index])) != offset)
      state().breach(&comm, "the memory of a collective is not at the same place of the windows of all ranks");
  }
}

bool is_by_copies(const Comm &comm, const Collective &call) {
  return call.kind == Kind::all_gather && call.count > comm.copied_counts && window_offset(comm, call.to) >= 0;
}

void count(const Comm &comm, const Collective &call) {
  if (call.kind == Kind::all_gather) ++state().count(Count::all_gathers);
  if (call.kind == Kind::reduce_scatter) ++state().count(Count::reduce_scatters);
  if (is_by_copies(comm, call)) ++state().count(Count::copy_engine_gathers);
}

// Counts the earlier messages of this kind to this peer.
size_t number_of(const std::vector<Collective> &launch, size_t index) {
  size_t number = 0;
  for (size_t i = 0; i < index; ++i)
    number += launch[i].kind == launch[index].kind && launch[i].root == launch[index].root;
  return number;
}

}  // namespace

bool is_message(const Collective &call) { return call.kind == Kind::send || call.kind == Kind::receive; }

const Collective *counterpart(const Comm &comm, const Meeting &meeting, size_t index) {
  const std::vector<Collective> &launch = *meeting.launches[static_cast<size_t>(comm.rank)];
  const Kind wanted = launch[index].kind == Kind::send ? Kind::receive : Kind::send;
  size_t before = number_of(launch, index);
  const auto peer = static_cast<size_t>(launch[index].root);
  if (peer >= meeting.launches.size()) return nullptr;
  for (const Collective &call : *meeting.launches[peer])
    if (call.kind == wanted && call.root == comm.rank && before-- == 0) return &call;
  return nullptr;
}

void inspect(const Comm &comm, const std::vector<Collective> &launch, size_t index, const Message &message) {
  inspect_message(comm, launch, index, launch[index].kind == Kind::send ? *message.received : *message.sent);
}

bool is_by_copies(const Comm &comm, const std::vector<Collective> &launch) {
  return !launch.empty() &&
         std::all_of(launch.begin(), launch.end(), [&](const Collective &call) { return is_by_copies(comm, call); });
}

void inspect(const Comm &comm, const Meeting &meeting) {
  const std::vector<Collective> &mine = *meeting.launches[static_cast<size_t>(comm.rank)];
  for (const auto &launch : meeting.launches)
    if (launch->size() != mine.size())
      return state().breach(&comm, "ranks launch different numbers of collectives as one");
  for (size_t i = 0; i < mine.size(); ++i) {
    for (const auto &launch : meeting.launches)
      if (!same((*launch)[i], mine[i])) return state().breach(&comm, "ranks call different collectives");
    if (is_message(mine[i])) {
      inspect_message(comm, meeting, i);
      continue;
    }
    for (const auto &launch : meeting.launches) inspect_access(comm, (*launch)[i]);
    inspect_places(comm, mine[i]);
    inspect_windows(comm, meeting, i);
    count(comm, mine[i]);
  }
}

}  // namespace simulated::nccl
