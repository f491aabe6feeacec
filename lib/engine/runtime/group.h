// SPDX-License-Identifier: Apache-2.0
// A parameter group of a sealed model. A group has one slot of gathered weights, or two if the schedule keeps forward
// and backward apart or planes are gathered by phase. Each piece of the group is gathered into a slot by itself. The
// group's full gradient is lent, reduced and drained as a whole or part by part.
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

// The bytes that a gather copies from planes of quantized parameters: codes and scales.
struct PlaneBytes {
  uint64_t row = 0, column = 0;

  void add(uint32_t form, uint64_t bytes) { (form ? column : row) += bytes; }
  uint8_t traced() const {
    return static_cast<uint8_t>((row ? trace::row_planes : 0) | (column ? trace::column_planes : 0));
  }
};

// The part of a slot's state that calls change. It is copied by itself for captures (capture.h).
struct SlotState {
  bool gathered = false;                   // the gather of this version has been enqueued
  bool prefetched = false;                 // gathered ahead, and no hold has asked for it yet
  using Counts = std::array<uint32_t, 5>;  // by phase
  Counts holds{}, piece_holds{};           // number of holds of the whole group, and of the piece by itself
  // The position of the visit that was unsharded last, in the list of its mode.
  uint32_t position = UINT32_MAX;

  uint32_t hold_count(fsdp_phase phase) const {
    return holds[static_cast<size_t>(phase)] + piece_holds[static_cast<size_t>(phase)];
  }
  uint32_t hold_count() const {
    return hold_count(FSDP_FORWARD) + hold_count(FSDP_BACKWARD) + hold_count(FSDP_RECOMPUTE) + hold_count(FSDP_EVAL);
  }
};

// The weights of one piece in one of the slots of its group.
struct GatheredPiece : SlotState {
  uint32_t piece = 0;
  uint32_t number = 0;                     // number in the model, the same on every rank
  uint32_t key = 0;                        // number of the pool request
  std::unique_ptr<device::Event> ready;    // the copies have arrived
  StreamEvents left;                       // each reading stream has passed its reshard
  std::vector<transport::Gather> gathers;  // the gathers that copy
  uint64_t pulled_bytes = 0;               // bytes that the gathers copy
  PlaneBytes planes;                       // bytes of quantized planes in pulled_bytes
  uint64_t shift = 0;                      // offset of the present buffer if buffers are shared
  std::vector<uint32_t> overlaps;          // keys whose buffers share bytes with this one
};

enum class GradStage { idle, lent, reducing };

// The part of a GradPart's state that calls change.
struct PartState {
  GradStage stage = GradStage::idle;
  std::vector<fsdp_stream> streams;  // all streams that wrote in this contribution, each once
  transport::Ticket ticket;
  uint32_t turn = 0;            // the buffer in which its last sums were made
  uint32_t complete_count = 0;  // number of its parameters that are complete in this contribution
  bool given = false;           // the part is being reduced, or was reduced, in this contribution
};
// Sums over the outer axis, by turn: sums that every outer rank gets, and sums that only the owner of the slot gets.
struct OuterSums {
  std::array<std::vector<transport::Sum>, 2> everywhere, slices;
};

struct Group;

// Parameters of a group, all or some, with their full gradients in one buffer. The buffer is lent, reduced and drained
// as a whole.
struct GradPart : PartState {
  uint32_t number = 0;  // number in the model
  Group *group = nullptr;
  const memory::PartPlan *plan = nullptr;
  std::string name;  // the group's name, with the name of its first parameter if it is not the whole group
  StreamEvents written;
  std::unique_ptr<device::Event> reduced;
  std::unique_ptr<device::Event> opened;  // on a device: earlier contributions are in a persistent buffer
  // Debug mode on a device: the event after which every byte of the buffer is 0xFF, except bytes written later.
  std::unique_ptr<device::Event> hidden;
  bool is_hidden = false;
  std::array<std::vector<transport::Sum>, 2> sums;  // by turn; without buffers that take turns only the first is used
  bool partial = false;                             // inner sums go to a partial buffer
  bool at_home = false;                             // the outer axis, or the reduce, writes to a buffer for the file
  bool everywhere = false;                          // inner sums go to whole main grads of every rank
  OuterSums outer;                                  // used if the outer axis adds each contribution of the part
  std::vector<uint32_t> overlaps;                   // parts whose buffers share bytes with this one's
  uint64_t reduced_bytes = 0;                       // bytes of full gradients that one reduce reads
  uint64_t all_reduced_bytes = 0;                   // bytes that one all-reduce reads: also the other ranks' sums
  const char *flight_name = nullptr;                // the flight recorder's copy
  const char *trace_name = nullptr;                 // the timeline's copy; NULL if there is none
  uint32_t trained_count() const;                   // number of its parameters that have a gradient now
};
// The part of a contribution's state that calls change.
struct ContributionState {
  bool open = false;               // a gradient was acquired, and fsdp_reduce_grad was not called since
  std::vector<uint8_t> acquired;   // parameters written in this contribution
  std::vector<uint8_t> completed;  // parameters that are complete in this contribution
  std::vector<uint8_t> touched;    // parameters written since the last publish (persistent buffers)
  std::vector<uint8_t> given;  // parameters with a gradient since the last publish; in the update window, on any rank
  std::vector<fsdp_stream> writers;  // for each parameter, the stream that wrote it last
  uint32_t reduced_count = 0;        // number of contributions in the main grads
  uint32_t given_count = 0;          // number of calls of fsdp_reduce_grad
  bool last = false;
};
struct Contribution : ContributionState {
  std::unique_ptr<device::Event> summed;  // the last contribution is summed over both axes
};
struct ParamPlace {
  uint32_t bucket = 0;  // index in the model
  uint32_t tensor = 0;  // index in the bucket
  uint32_t part = 0;    // index in the group; unused for a frozen parameter
  uint32_t piece = 0;   // index in the group
};

struct Group {
  uint32_t index = 0;
  const memory::GroupSpec *spec = nullptr;
  const memory::GroupPlan *plan = nullptr;
  std::vector<ParamPlace> places;
  std::vector<GatheredPiece> slots;  // slot by slot, each with all pieces
  Contribution grad;
  std::span<GradPart> parts;
  bool lends_all = true;  // can its parts be lent at once?
  OuterSums outer;        // sums over the outer axis, of the last contribution
  std::vector<transport::Gather> outer_weights,
      outer_grads;                             // gathers over the outer axis when publishing and when finishing
  std::vector<transport::Gather> whole_grads;  // no_shard with an outer axis: brings other inner ranks' sums at the end
  std::vector<transport::Gather> refresh;      // refreshes whole compute weights when publishing
  uint64_t refreshed_bytes = 0;                // bytes that one refresh copies
  PlaneBytes refreshed_planes;                 // the planes' part of these bytes
  uint64_t reduced_bytes = 0;                  // bytes of full gradients that the reduces of a contribution read

  const char *flight_name = nullptr;  // the flight recorder's copy
  const char *trace_name = nullptr;   // the timeline's copy; NULL if there is none

  const char *name() const { return spec->name.c_str(); }
  bool trained() const { return spec->trained(); }
  size_t piece_count() const { return plan->pieces.size(); }
  // The pieces in the slot with the number `slot`, or in the slot that the phase uses.
  std::span<GatheredPiece> pieces_in(uint32_t slot) {
    return std::span(slots).subspan(slot * piece_count(), piece_count());
  }
  std::span<GatheredPiece> pieces(fsdp_phase phase) { return pieces_in(plan->slot_of(phase)); }
  GradPart &part_of(uint64_t param_index) { return parts[places[param_index].part]; }
};

inline uint32_t GradPart::trained_count() const {
  uint32_t count = 0;
  for (const uint32_t param : plan->params) count += group->spec->params[param].has_gradient();
  return count;
}

}  // namespace fsdp::engine
