// SPDX-License-Identifier: Apache-2.0
// Matrices that come whole to their owners inside the update window, and go back (memory/matrix_plan.h). They travel in
// waves. A row whose owner is another rank takes this way:
//
//   collected   source plane -> `outer` area -> [outer axis] -> `rows` area -> [inner axis] -> the owner's `whole` area
//   returned    target plane <- `outer` area <- [outer axis] <- `rows` area <- [inner axis] <- the owner's `whole` area
//
// Rows of this rank's own matrices are copied between plane and `whole` area. Rows whose owner has this rank's outer
// index are copied between plane and `rows` area. Rows of a plane in the file are copied through memory of their own.
// The library's reduce stream copies and exchanges over the inner axis, and its outer stream over the outer axis. The
// ranks of a mesh enqueue collections (C) and returns (R) in one order: C1 C2 R1 C3 R2 C4 ... When the owner asks for
// the next wave, the last one is returned, and then the wave after the next is collected. Ranks in different meshes of
// a group may have different numbers of waves. But the waves of the meshes come in the same order on all ranks, mesh by
// mesh, so ranks cannot wait for each other in a circle.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradients/optimizer.h"
#include "engine/runtime/file_lane.h"

namespace fsdp::engine {

// The memory that travels: shards of the main grads, of the main weights or of a state.
struct MatrixPlane {
  enum class Values : uint8_t { grads, weights, state };
  Values values = Values::grads;
  uint32_t state = 0;  // index in the model

  uint64_t number() const { return static_cast<uint64_t>(values) << 32 | state; }
};
struct MatrixPlanes {
  MatrixPlane source, target;
  fsdp_dtype dtype = FSDP_FLOAT32;  // dtype of the owners' matrices, and of messages

  bool has_grads() const {
    return source.values == MatrixPlane::Values::grads || target.values == MatrixPlane::Values::grads;
  }
  uint64_t hash() const {
    return mix_calls(mix_calls(source.number()) ^ target.number()) ^ static_cast<uint64_t>(dtype);
  }
};

// Matrices of one owner with the same shape, from consecutive batches.
struct MatrixRun {
  const memory::Matrix *first = nullptr;
  uint64_t count = 0, stride = 0;  // stride in elements
};
struct GivenMatrices {
  const memory::Matrix *first = nullptr;
  uint64_t count = 0, stride_bytes = 0;
  std::byte *data = nullptr;
  fsdp_dtype dtype = FSDP_FLOAT32;
};

class Matrices {
 public:
  Matrices(Runtime &runtime, Optimizer &optimizer);

  // These functions throw INVALID_STATE, and name the expected call.
  void require_matrices(const char *call) const;
  void require_collected(const char *call) const;
  // `source` NULL means the main grads; `target` NULL means the source.
  MatrixPlanes read_planes(const char *source, const char *target, fsdp_dtype dtype) const;
  // Called when the ranks have met for this call with equal planes.
  void collect(const MatrixPlanes &planes, device::Stream &caller);
  // The next matrices of this rank; nothing if there are no more. The caller works on them on `stream`.
  std::optional<GivenMatrices> next(fsdp_stream stream, device::Stream &caller);
  // Returns the last waves. First all their work is enqueued, because other ranks wait for that, and then the caller
  // waits.
  void return_rest();
  void give_back(device::Stream &caller);
  // Throws if another rank has given up this round.
  void check_rounds(const char *call);
  // Says why the step cannot be discarded now; empty if it can.
  std::string find_written() const;
  // Called when the window has closed or its step was discarded.
  void close() noexcept { given_ = wrote_weights_ = false; }

 private:
  // One of the turns in which waves use a mesh's region.
  struct Turn {
    transport::Ticket inner, outer;        // tickets of the last return in this turn
    std::unique_ptr<device::Event> ready;  // the owners have the matrices
  };
  // The streams and the memory for the waves of a mesh.
  struct WaveStreams {
    MeshComms &comms;
    device::Stream &inner;
    device::Stream *outer;  // NULL: the outer axis divides nothing
    transport::Part region;
    std::byte *file_rows;               // memory for rows of planes in the file
    FileLane *inner_file, *outer_file;  // for the two streams; NULL: no rows are in the file
  };
  using Rows = std::vector<memory::OwnRows>;
  // Some of this rank's rows in a plane, and their place in memory: the plane, or memory for rows of the file.
  struct PlaneRows {
    std::byte *data;
    fsdp_dtype dtype;
    std::optional<HomePages> pages;  // if they are in the file
  };

  MatrixPlane read_plane(const char *name, const char *field) const;
  void check_plane(const MatrixPlane &plane, const char *name) const;
  StatePart part_of(const Shard &shard, const MatrixPlane &plane) const;
  void leave_out() noexcept;
  WaveStreams streams_of(const memory::MatrixWave &wave);
  Turn &turn_of(const memory::MatrixWave &wave) { return turns_[wave.mesh][wave.turn]; }
  // Visits the streams of each mesh that has matrices.
  template <class Visit>
  void for_each_mesh(Visit &&visit);
  void route(uint32_t wave);
  void order(device::Stream &before, device::Stream &after);
  void await_turn(const WaveStreams &on, const Turn &turn);
  void collect_wave(uint32_t number);
  void return_wave(uint32_t number);
  void bring(const WaveStreams &on, const memory::MatrixWave &wave, const Rows &rows, device::Stream &stream);
  void take(const WaveStreams &on, const memory::MatrixWave &wave, const Rows &rows, device::Stream &stream);
  PlaneRows rows_in(const WaveStreams &on, const memory::MatrixWave &wave, const memory::OwnRows &rows,
                    const MatrixPlane &plane) const;
  transport::Ticket exchange(const WaveStreams &on, bool over_outer, bool back);
  bool is_own(uint32_t index) const;
  std::optional<MatrixRun> find_run();
  void note_worked();
  void advance();
  void check_all_given() const;
  const memory::MatrixPlan &plan() const { return runtime_.plan.matrices; }

  Runtime &runtime_;
  Optimizer &optimizer_;
  std::vector<std::array<Turn, memory::MatrixPlan::turns>> turns_;  // by mesh
  std::unique_ptr<device::Event> order_;                            // for short use within one call
  StreamEvents worked_;                                             // the caller's work on the wave's matrices is done
  std::vector<const Shard *> shards_;  // by matrix: this rank's shard of its parameter; NULL: it has none
  std::vector<uint8_t> left_out_;      // by matrix: does this step leave the parameter unchanged?
  memory::MatrixRoute route_;
  memory::RouteScratch scratch_;
  std::vector<transport::Move> moves_;

  // The state between collect() and give_back().
  MatrixPlanes planes_;
  uint32_t wave_ = 0;             // the wave on which the caller works
  uint32_t next_ = 0;             // the matrix at which find_run() begins to look
  uint32_t collected_ = 0;        // number of waves whose collection is enqueued
  bool given_ = false;            // the caller has matrices
  fsdp_stream stream_ = nullptr;  // the stream on which the caller works on them
  bool wrote_weights_ = false;    // a return to main weights has ended in this window
};

}  // namespace fsdp::engine
