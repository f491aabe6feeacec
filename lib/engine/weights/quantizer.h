// SPDX-License-Identifier: Apache-2.0
// When main weights are published, makes compute weights from them that are codes with scales. A rank's part of a
// parameter is whole granules, so the scale of a block needs no data of other ranks. The scale of a whole parameter
// does.
#pragma once

#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "engine/runtime/runtime.h"
#include "engine/weights/shared_values.h"

namespace fsdp::engine {

// The arguments of kernels that make planes of whole blocks, for publishing and for loading.
using BlockWork = std::variant<device::Mxfp8Quantize, device::Fp8BlockQuantize>;

// Rows of the parameter that this rank stores, made from adjacent fp32 numbers. `elements` and `scales` are their
// places in the planes of elements and of scales, in any form.
struct BlockRows {
  const Bucket &bucket;
  const memory::ParamSpec &param;
  layout::Slice elements, scales;
  const float *from;
};
BlockWork make_block_work(const memory::ModelSpec &spec, const BlockRows &rows);

void quantize(device::Stream &stream, const BlockWork &work);

// One visit of the walk over everything that this rank stores: its part of a parameter in one plane of the wanted
// kinds.
struct PlaneSlice {
  const Group &group;
  uint32_t param_index;
  uint32_t ordinal;  // number of the parameter in the model
  const Bucket &bucket;
  uint32_t tensor;  // index in the bucket
  const Plane &plane;
  layout::Slice slice;  // the part that this rank owns; its count is 0 if it owns nothing

  const memory::ParamSpec &param() const { return group.spec->params[param_index]; }
  std::byte *data() const { return plane.at(slice); }
};

// Visits groups in the order of declaration, including frozen parameters. Within a group the order is by parameter, and
// then by kind in the plan's order.
template <class Visit>
void for_each_slice(const Runtime &runtime, std::initializer_list<PlaneKind> kinds, Visit &&visit) {
  uint32_t ordinal = 0;
  for (const Group &group : runtime.groups)
    for (uint32_t p = 0; p < group.places.size(); ++p, ++ordinal) {
      const ParamPlace &place = group.places[p];
      const Bucket &bucket = runtime.bucket(place);
      for (const Plane &plane : bucket.planes)
        for (const PlaneKind kind : kinds)
          if (plane.plan->kind == kind)
            visit(PlaneSlice{group, p, ordinal, bucket, place.tensor, plane,
                             runtime.slice_of(plane, place.tensor, plane.plan->owned)});
    }
}

// Warns of quantized parameters with main weights that are not finite at a publish; no call refuses them. The scales
// show this, so publishing reads no more data. On a device, the first call in the context that finds the work done
// warns at its end, or the model warns at its end. No call waits for the count.

class NonfiniteWeights final : public Unsettled {
 public:
  explicit NonfiniteWeights(Runtime &runtime);
  ~NonfiniteWeights() override;
  NonfiniteWeights(const NonfiniteWeights &) = delete;
  NonfiniteWeights &operator=(const NonfiniteWeights &) = delete;
  // Adds the work on this rank's part of a parameter. Counts are in the order of these calls, with those of MXFP8
  // first.
  void add(const PlaneSlice &main, const device::Mxfp8Quantize &work);
  void add(const PlaneSlice &main, const device::Fp8BlockQuantize &work);
  void add_amax(const PlaneSlice &main, uint64_t index);

  // Are the next weights that are quantized on the stream to be counted? If so, the work that quantizes them writes its
  // counts here, and the caller calls finish() afterwards. `amaxes` are this rank's amaxes of all parameters with one
  // scale.
  bool begin(device::Stream &stream);
  uint64_t *scale_counts() const { return found_; }
  uint64_t *block_counts() const { return found_ + of_scales_.size(); }
  void finish(device::Stream &stream, const float *amaxes);
  // Warns of the last count, once, if the work of the count is done. Any thread may call it.
  void settle() noexcept override;

 private:
  struct CountedScales {
    std::string name;
    uint64_t scales;  // number of scales
  };
  struct Measured {
    std::string name;
    uint64_t index;
  };
  uint64_t counts() const { return of_scales_.size() + of_blocks_.size(); }
  void report() noexcept;
  const char *quantized_weights() const;
  void report_counts() const;
  void report_amaxes() const;

  Runtime &runtime_;
  std::vector<CountedScales> of_scales_;
  std::vector<std::string> of_blocks_;  // names of parameters
  std::vector<Measured> measured_;
  uint64_t *found_;   // counts in memory of the device, where kernels write them
  uint64_t *counts_;  // the host's copy of the counts, made with one copy
  float *amaxes_;
  std::unique_ptr<device::Event> done_;
  std::mutex mutex_;
  uint64_t version_ = 0;  // version whose counts are under way or not yet reported; 0: none
};

class Quantizer {
 public:
  explicit Quantizer(Runtime &runtime);
  // Quantizes all quantized parameters, after the work on the stream that writes their main weights. Collective if some
  // parameters have one scale for all of their elements.
  void quantize(device::Stream &stream);

 private:
  struct ScaleCopy {
    std::byte *to;
    const float *from;
    uint64_t count;
  };
  void add_blocks(const Runtime &runtime, const PlaneSlice &main);
  void add_part(const PlaneSlice &main, bool via_bf16, uint64_t index);
  void add_scales(const Runtime &runtime, const Bucket &bucket, uint64_t first);
  void quantize_whole(device::Stream &stream);

  SharedAmaxes amaxes_;
  NonfiniteWeights nonfinite_;
  // The work on this rank's parts.
  std::vector<device::Mxfp8Quantize> mxfp8_;
  std::vector<device::Fp8BlockQuantize> fp8_blocks_;
  std::vector<device::AmaxSpan> amax_spans_;
  std::vector<device::Fp8Quantize> parts_;  // of parameters with one scale
  std::vector<ScaleCopy> scales_;           // scales of whole parameters that this rank publishes
};

}  // namespace fsdp::engine
