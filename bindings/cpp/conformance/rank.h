// SPDX-License-Identifier: Apache-2.0
// One rank of one scenario over fsdp.hpp, and the words of its lines. bindings/conformance/README.md has the format.
#ifndef FSDP_BINDINGS_CPP_CONFORMANCE_RANK_H
#define FSDP_BINDINGS_CPP_CONFORMANCE_RANK_H

#include <fsdp.hpp>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

/** A line: what it calls, KEY=VALUE apart from the other words, and what stands behind "->" or "!". */
struct Line {
  std::string text;
  std::vector<std::string> words, expected;
  std::map<std::string, std::string> keys;
  int only = -1, but = -1;  // the rank of "on" and "off"
  bool gives = false, fails = false;

  std::string word(std::size_t index) const { return index < words.size() ? words[index] : ""; }
  std::int64_t integer(std::size_t index) const { return std::strtoll(word(index).c_str(), nullptr, 10); }
  double number(std::size_t index) const { return std::stod(words.at(index)); }
  bool has(const std::string &key) const { return keys.count(key) != 0; }
  std::int64_t key_or(const std::string &key, std::int64_t otherwise) const {
    return has(key) ? std::strtoll(keys.at(key).c_str(), nullptr, 10) : otherwise;
  }
  double key_number(const std::string &key) const { return has(key) ? std::stod(keys.at(key)) : 0; }
};

struct NamedGroup {
  fsdp::Group group;
  std::vector<fsdp::Param> params;
};

/** The handles of a rank by their names. */
class Rank {
 public:
  Rank(fsdp::Context made, std::string save_folder, std::string load_folder)
      : context(std::move(made)),
        rank(context.rank()),
        world_size(context.world_size()),
        save_folder_(std::move(save_folder) + "/" + std::to_string(world_size) + "/"),
        load_folder_(std::move(load_folder) + "/") {}

  /** Makes the call, and returns what it gives: "-" for nothing. A param or visit line is no call. */
  std::string execute(const Line &line);

  fsdp::Context context;
  std::uint32_t rank, world_size;

 private:
  std::string declare(const Line &line);
  std::string move_values(const Line &line);
  std::string gather(const Line &line);
  std::string get_param(const Line &line);
  std::string get_params(const Line &line);
  void unshard(const Line &line);
  void reshard(const Line &line);
  std::string plane(const Line &line);
  std::string write_grads(const Line &line);
  std::string end_step(const Line &line);
  std::string ask(const Line &line);
  std::string use_checkpoint(const Line &line);
  std::string apply_grads(const Line &line);
  std::string all_reduce_values(const Line &line);
  void round_stochastic(const Line &line);
  void change_matrices(const Line &line);
  void create_model(const Line &line);
  void create_group(const Line &line);
  void visit(const Line &line);
  void load_param(const Line &line);
  void acquire_grad(const Line &line);
  void put_grad(const Line &line);

  std::uint64_t element_count(const NamedGroup &group, std::uint64_t index) const;
  double value_at(const Line &line, std::size_t first, std::int64_t shift, std::uint64_t i) const;
  std::vector<float> make_array(const Line &line, std::size_t first, std::int64_t shift, std::uint64_t count) const;

  fsdp::Model &model(const Line &line) { return models_.at(line.word(1)); }
  NamedGroup &group(const Line &line) { return groups_.at(line.word(1)); }

  std::string save_folder_, load_folder_;
  std::map<std::string, fsdp::Mesh> meshes_;
  std::map<std::string, fsdp::Model> models_;
  std::map<std::string, NamedGroup> groups_;
  std::vector<std::string> group_order_;
  std::map<std::string, fsdp::Checkpoint> checkpoints_;
  // By group, phase and piece, which is -1 for the whole group.
  using HoldKey = std::tuple<std::string, std::int64_t, std::int64_t>;
  std::map<HoldKey, std::vector<fsdp::Weights>> holds_;
  std::vector<fsdp::Param> declared_;  // for the next create_group
  std::vector<fsdp::Visit> visits_;    // for the next set_schedule
};

/** The CRC-32 of IEEE 802.3 of the data, continued from `before`. */
std::uint32_t crc32_of(std::uint32_t before, const void *data, std::size_t size_bytes);
std::string hex(std::uint64_t value, int digits);

#endif
