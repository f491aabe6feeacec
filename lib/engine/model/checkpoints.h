// SPDX-License-Identifier: Apache-2.0
// Saves a sealed model to checkpoints and loads it: finds the memory of the checkpoint's tensors, and the numbers of
// steps that belong to them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/job/load.h"
#include "checkpoint/job/save.h"
#include "engine/weights/compact_numbers.h"
#include "memory/model_plan.h"

namespace fsdp::engine {

// The layout of a sealed model as JSON.
std::string describe(const memory::ModelSpec &spec, const memory::ModelPlan &plan);
// The model's mesh and strategies in one line, for log messages.
std::string describe_mesh(const memory::ModelSpec &spec);

class Checkpoints {
 public:
  // `counts_steps`: the library's optimizer counts steps. If false, published versions count as steps.
  Checkpoints(Runtime &runtime, bool counts_steps);
  ~Checkpoints();

  // `step` is the checkpoint's step; without a value, the model's own step.
  void save(const std::string &folder, std::optional<uint64_t> step, checkpoint::SaveChoice choice);
  // Adds the model in its present state to a checkpoint. Must be called outside of the update window.
  void add_to(checkpoint::SaveOrder &order, const std::string &name, const char *call);
  // watch() notes a save in the background. await_copied() must be called before main weights or states are written: it
  // waits until the save has copied them.
  void watch(const std::shared_ptr<checkpoint::Save> &save) { save_ = save; }
  void await_copied();
  uint64_t step() const;
  checkpoint::LoadResult load(const char *call, const std::string &folder, const checkpoint::LoadOptions &options);
  checkpoint::LoadResult load_weights(const std::string &path, std::span<const checkpoint::Rename> renames,
                                      const checkpoint::LoadOptions &options);
  // Describes the last load as JSON. Throws INVALID_STATE if there was none.
  std::string describe_load(const char *call) const;

 private:
  // A stream that copies memory of a device while other streams compute.
  struct CopyStream;
  using LoadInto = std::function<checkpoint::LoadResult(const checkpoint::LoadedModel &)>;
  checkpoint::LoadResult load_into(const char *call, const LoadInto &take);
  checkpoint::ModelShards shards() const;
  const Plane &plane_of(const checkpoint::KeptTensor &tensor) const;
  layout::Slice slice_of(const checkpoint::KeptTensor &tensor) const;
  void read(const checkpoint::KeptTensor &tensor, uint64_t first, std::span<std::byte> to) const;
  void read_device(const std::byte *from, std::span<std::byte> to) const;
  void write(const checkpoint::KeptTensor &tensor, uint64_t first, const checkpoint::ElementType &type,
             std::span<const std::byte> elements);
  // Reads bytes of the tensor in the form that a checkpoint stores. `copy` copies from the model's memory.
  void read_with(const checkpoint::KeptTensor &tensor, uint64_t first, std::span<std::byte> to,
                 const CompactNumbers::CopyOut &copy) const;
  void write_compact(const checkpoint::KeptTensor &tensor, uint64_t first, const checkpoint::ElementType &type,
                     std::span<const std::byte> elements);
  const Bucket &bucket_of(const checkpoint::KeptTensor &tensor) const;
  void note_seed(const char *call, const checkpoint::LoadResult &result, const std::optional<std::string> &model) const;
  void write_float64(const Plane &plane, std::byte *to, std::span<const std::byte> elements) const;
  void note_steps(const checkpoint::KeptTensor &tensor, const checkpoint::ElementType &type,
                  std::span<const std::byte> element);
  // Collective over the model's mesh, even if its groups have several meshes.
  void agree_on_steps(const char *call);
  void note_load(const char *call, const std::string &from, const checkpoint::LoadResult &result);
  std::string spared(const std::string &folder) const;

  Runtime &runtime_;
  bool counts_steps_;
  std::weak_ptr<checkpoint::Save> save_;  // the last save in the background
  double saved_steps_ = 0;                // the optimizer's number of steps in that save
  std::unique_ptr<CopyStream> copies_;    // exists only on a device, from the first save on
  StateEncoder encoder_;                  // for the checkpoint that is being loaded
  std::optional<double> steps_;           // the optimizer's number of steps in the checkpoint that is being loaded
  // The step that was loaded, and the version under which it is published.
  uint64_t loaded_step_ = 0, loaded_version_ = 1;
  std::string loaded_folder_, loaded_name_;
  std::string load_text_;  // the text of describe_load()
};

}  // namespace fsdp::engine
