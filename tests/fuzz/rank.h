// SPDX-License-Identifier: Apache-2.0
// One rank that makes random calls. It keeps the objects that it has made and its current aim, and it chooses
// arguments. A wild rank gives nonsense for some arguments; the other arguments serve the aim. A pointer is NULL or
// points to a large enough buffer, because the contract does not cover other pointers.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "fsdp.h"
#include "random.h"

namespace fuzz {

// The kind of world in which a round is played.
enum World { world_of_one, world_of_two, plan_world, world_count };
enum Kind { a_context, a_mesh, a_model, a_group, a_capture, a_checkpoint, kind_count };

constexpr uint64_t buffer_bytes = 1 << 16;
constexpr uint64_t max_elements = 2048;  // bytes of a parameter, in a context that has memory
// A context waits this long. Where all calls must succeed it also waits for a busy disk; otherwise it does not wait
// long, because some waits never end.
constexpr uint32_t patient_ms = 20'000, hasty_ms = 100;

struct ParamFacts {
  uint64_t element_count;
  fsdp_dtype dtype;
  bool frozen;
  std::string name{};
  bool trained = true;
};

struct GroupFacts {
  fsdp_model *model;
  std::vector<ParamFacts> params;
  std::string name{};
  fsdp_main_storage main_storage = 0;
};

// The object of the next call.
struct Aim {
  fsdp_context *context = nullptr;
  fsdp_model *model = nullptr;
  fsdp_group *group = nullptr;
  uint64_t param = 0;
  uint32_t piece = 0;
  fsdp_phase phase = FSDP_FORWARD;
  uint32_t flags = 0;
  std::string state;      // the caller's own state of the model
  bool has_home = false;  // the model has states in a file
};

// Handles of all ranks of a round, alive or destroyed. For a rank, another rank's handle is as invalid as nonsense.
struct Elsewhere {
  std::array<std::atomic<void *>, 16> handles{};
  std::atomic<int> left = 0;  // number of ranks that destroy their objects
};

class Rank {
 public:
  Rank(uint64_t seed, Elsewhere &elsewhere);
  void say_left() { ++elsewhere_.left; }
  bool peer_left() const { return elsewhere_.left > 0; }  // objects made before this one
  Rank(const Rank &) = delete;

  // These functions choose arguments.
  bool wild() { return wildness && random.one_in(wildness); }
  uint64_t nonsense();
  uint64_t number(uint64_t sensible) { return wild() ? nonsense() : sensible; }
  uint32_t number32(uint32_t sensible) { return wild() ? static_cast<uint32_t>(nonsense()) : sensible; }
  double real(double sensible);
  int32_t choice(int32_t last);  // a value of an enum, or 0
  int32_t exactly(int32_t value) { return wild() ? static_cast<int32_t>(nonsense()) : value; }
  uint32_t flags(uint32_t legal);
  const char *name();
  fsdp_stream stream() { return wild() ? reinterpret_cast<fsdp_stream>(nonsense() | 1) : nullptr; }
  template <class T>
  T *or_null(T *pointer) {
    return wild() ? nullptr : pointer;
  }

  fsdp_context *context() { return static_cast<fsdp_context *>(handle(a_context, aim.context)); }
  fsdp_mesh *mesh() { return static_cast<fsdp_mesh *>(handle(a_mesh, any(a_mesh))); }
  fsdp_model *model() { return static_cast<fsdp_model *>(handle(a_model, aim.model)); }
  fsdp_group *group() { return static_cast<fsdp_group *>(handle(a_group, aim.group)); }
  fsdp_capture *capture() { return static_cast<fsdp_capture *>(handle(a_capture, nullptr)); }

  fsdp_checkpoint *checkpoint() { return static_cast<fsdp_checkpoint *>(handle(a_checkpoint, any(a_checkpoint))); }

  World world() const { return plans ? plan_world : alone ? world_of_one : world_of_two; }

  // These functions return the rank's knowledge.
  void add(Kind kind, void *handle);
  void *any(Kind kind);  // returns NULL if there is none
  void aim_anywhere();
  ParamFacts param() const;
  uint64_t param_count() const;  // of the group that is aimed at
  std::vector<ParamFacts> trainable(const fsdp_model *model) const;

  Random random;
  uint64_t wildness = 0;  // one argument in this many is nonsense; 0: none
  bool alone = true;      // no other rank can end an object that this one uses
  bool plans = false;
  // No rank of the round makes a wrong call on purpose, from its first call to its last.
  bool tame = false;
  uint32_t world_size = 1;
  uint32_t timeout_ms = hasty_ms;
  Aim aim;
  std::array<std::vector<void *>, kind_count> alive;
  std::map<const void *, GroupFacts> groups;
  std::map<const void *, fsdp_main_storage> main_storages;  // counts models
  std::set<const void *> chunked;                           // models in a pass over chunks of shards
  unsigned char *buffer, *arena;

 private:
  void *handle(Kind kind, void *aimed);

  Elsewhere &elsewhere_;
  std::string name_;
  uint64_t names_ = 0;
  std::vector<unsigned char> memory_;
};

[[noreturn]] void give_up(const std::string &why);
inline void require(bool holds, const char *what) {
  if (!holds) give_up(what);
}

// One call of the header. Void ones count as FSDP_OK.
struct Case {
  const char *name;
  fsdp_status (*run)(Rank &rank);
  bool on_host = true;  // false: it cannot return FSDP_OK without a GPU
};
const std::vector<Case> &checkpoint_cases();
const std::vector<Case> &context_cases();
const std::vector<Case> &model_cases();
const std::vector<Case> &group_cases();
const std::vector<Case> &lookup_cases();
const std::vector<Case> &optimizer_cases();
const std::vector<Case> &all_cases();

// Makes the call and checks its status against the contract.
fsdp_status call(Rank &rank, const Case &chosen);
fsdp_status call(Rank &rank, const char *name);
void call_anything(Rank &rank);

// Makes the calls of a usual program, with random calls in between.
void declare(Rank &rank);
void train(Rank &rank);
void leave(Rank &rank);

}  // namespace fuzz
