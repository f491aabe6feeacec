// SPDX-License-Identifier: Apache-2.0
// What a parameter group of a sealed model knows about itself. A group has one slot of gathered weights, or two where
// the schedule keeps forward and backward apart or planes are gathered by phase. It has one full gradient, or parts of
// it that are lent, reduced and drained one by one.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "engine/runtime/storage.h"
#include "engine/runtime/stream_trace.h"
#include "memory/model_plan.h"
#include "trace/timeline.h"
#include "transport/team.h"

namespace fsdp::engine {

// What a gather copies of the planes of quantized parameters, codes and scales.
struct PlaneBytes {
  uint64_t row = 0, column = 0;

  void add(uint32_t form, uint64_t bytes) { (form ? column : row) += bytes; }
  uint8_t traced() const {
    return static_cast<uint8_t>((row ? trace::row_planes : 0) | (column ? trace::column_planes : 0));
  }
};

// What calls change of a slot. States are copied on their own (state.h).
struct SlotState {
  bool gathered = false;            // the gather of this version has been enqueued
  bool prefetched = false;          // gathered ahead, and no hold has asked for it yet
  std::array<uint32_t, 5> holds{};  // by phase
  uint32_t position = 0;            // of the visit that was unsharded last, in the list of its mode

  uint32_t hold_count() const { return holds[1] + holds[2] + holds[3] + holds[4]; }
};

struct GatherSlot : SlotState {
  uint32_t key = 0;                        // number of the pool request
  std::unique_ptr<device::Event> ready;    // the copies have arrived
  StreamEvents left;                       // the streams that read have passed their reshard
  std::vector<transport::Gather> gathers;  // copied ones
  PlaneBytes planes;                       // ... of group.pulled_bytes
  uint64_t shift = 0;                      // of the buffer that they go to now, where buffers are shared
  std::vector<uint32_t> overlaps;          // keys whose buffers share bytes with this one
};

enum class GradStage { idle, lent, reducing };

// What calls change of a part's buffer.
struct PartState {
  GradStage stage = GradStage::idle;
  std::vector<fsdp_stream> streams;  // all that wrote in this contribution, each once
  transport::Ticket ticket;
  uint32_t complete_count = 0;  // parameters of it that this contribution has completed
  bool given = false;           // it is reduced, or was, in this contribution
};

// Sums over the outer axis: everywhere, and of slots by turn.
struct OuterSums {
  std::vector<transport::Sum> everywhere;
  std::array<std::vector<transport::Sum>, 2> slices;
};

struct Group;

// Parameters of a group whose full gradients lie in one buffer, which is lent, reduced and drained: all, or some.
struct GradPart : PartState {
  uint32_t number = 0;  // in the model
  Group *group = nullptr;
  const memory::PartPlan *plan = nullptr;
  std::string name;  // the group's, and that of its first parameter where it is not all of the group
  StreamEvents written;
  std::unique_ptr<device::Event> reduced;
  std::unique_ptr<device::Event> opened;  // of a device: earlier contributions are in a buffer that keeps them
  // Debug, of a device: every byte of the buffer is 0xFF once the event is done, unless something has written there.
  std::unique_ptr<device::Event> hidden;
  bool is_hidden = false;
  std::array<std::vector<transport::Sum>, 2> sums;  // by turn; without a partial buffer the first
  bool partial = false;                             // inner sums go to a partial buffer
  bool everywhere = false;                          // ... to whole main grads of every rank
  OuterSums outer;                                  // where the outer axis adds each contribution of it
  std::vector<uint32_t> overlaps;                   // parts whose buffers share bytes with this one's
  uint64_t reduced_bytes = 0;                       // of full gradients that one reduce reads
  uint64_t all_reduced_bytes = 0;                   // that one all-reduce reads: those, and the other ranks' sums
  const char *flight_name = nullptr;                // the flight recorder's copy
  const char *trace_name = nullptr;                 // the timeline's copy; NULL if there is none

  uint32_t trained_count() const;  // of its parameters, those that have a gradient now
};

// What calls change of a group's gradient.
struct ContributionState {
  bool open = false;                 // a gradient of it was acquired, and fsdp_reduce_grad not called since
  std::vector<uint8_t> acquired;     // parameters written in this contribution
  std::vector<uint8_t> completed;    // ... and that no one writes any more
  std::vector<uint8_t> touched;      // ... since the last publish (persistent buffers)
  std::vector<uint8_t> given;        // parameters that got a gradient since then; in the update window, on any rank
  std::vector<fsdp_stream> writers;  // the stream that wrote each parameter last
  uint32_t reduced_count = 0;        // contributions in the main grads
  uint32_t given_count = 0;          // calls of fsdp_reduce_grad
  bool last = false;
};

struct Contribution : ContributionState {
  std::unique_ptr<device::Event> summed;  // what was given last, over the outer axis too
};

struct ParamPlace {
  uint32_t bucket = 0;  // of the model
  uint32_t tensor = 0;  // in the bucket
  uint32_t part = 0;    // of the group; of a frozen one it says nothing
};

struct Group {
  uint32_t index = 0;
  const memory::GroupSpec *spec = nullptr;
  const memory::GroupPlan *plan = nullptr;
  std::vector<ParamPlace> places;
  std::vector<GatherSlot> slots;
  Contribution grad;
  std::span<GradPart> parts;
  bool lends_all = true;  // can its parts be lent at once?
  OuterSums outer;        // of the last contribution
  std::vector<transport::Gather> outer_weights,
      outer_grads;                             // over the outer axis: what publishing and finishing gather
  std::vector<transport::Gather> whole_grads;  // no_shard with an outer axis: the other inner ranks' sums, at the end
  std::vector<transport::Gather> refresh;      // whole compute weights, at publish
  uint64_t pulled_bytes = 0;                   // that one gather or refresh copies
  PlaneBytes refreshed_planes;                 // ... of them by a refresh
  uint64_t reduced_bytes = 0;                  // of full gradients that the reduces of a contribution read

  const char *flight_name = nullptr;  // the flight recorder's copy
  const char *trace_name = nullptr;   // the timeline's copy; NULL if there is none

  const char *name() const { return spec->name.c_str(); }
  bool trained() const { return spec->trained(); }
  GatherSlot &slot(fsdp_phase phase) { return slots[plan->slot_of(phase)]; }
  GradPart &part_of(uint64_t param_index) { return parts[places[param_index].part]; }
};

inline uint32_t GradPart::trained_count() const {
  uint32_t count = 0;
  for (const uint32_t param : plan->params) count += group->spec->params[param].has_gradient();
  return count;
}

}  // namespace fsdp::engine
