// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/group_meshes.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <string>

#include <fmt/ranges.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "transport/exchange.h"

namespace fsdp::engine {
namespace {

using memory::GroupInstance;
using memory::ParamIdentity;

// Writes numbers and names into a message. The ranks of a job run the same release on machines of one kind, so the
// numbers need no fixed byte order.
class ListWriter {
 public:
  void add(uint64_t value) {
    const auto *bytes = reinterpret_cast<const std::byte *>(&value);
    message.insert(message.end(), bytes, bytes + sizeof value);
  }
  void add(const std::string &text) {
    add(text.size());
    const auto *bytes = reinterpret_cast<const std::byte *>(text.data());
    message.insert(message.end(), bytes, bytes + text.size());
  }
  template <class T>
  void add(const std::vector<T> &values) {
    add(values.size());
    for (const T &value : values) add(uint64_t{value});
  }

  std::vector<std::byte> message;
};

class ListReader {
 public:
  explicit ListReader(std::span<const std::byte> message) : rest_(message) {}
  uint64_t number() {
    uint64_t value = 0;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() {
    const auto bytes = take(number());
    return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
  }
  template <class T>
  std::vector<T> numbers() {
    std::vector<T> values(count());
    for (T &value : values) value = static_cast<T>(number());
    return values;
  }

 private:
  // Each counted entry has at least 8 bytes, so a wrong count is found before memory is allocated for it.
  uint64_t count() {
    const uint64_t value = number();
    if (value > rest_.size() / sizeof value) refuse();
    return value;
  }
  std::span<const std::byte> take(uint64_t bytes) {
    if (bytes > rest_.size()) refuse();
    const auto taken = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return taken;
  }
  [[noreturn]] static void refuse() {
    fail(FSDP_MISMATCH, "fsdp_seal_model: a rank's list of the meshes of its groups is cut short");
  }

  std::span<const std::byte> rest_;
};

std::string describe(std::span<const uint32_t> ranks) { return format_text("{{{}}}", fmt::join(ranks, ", ")); }

// The first group of the mesh, for messages.
const std::string &group_of(const memory::ModelSpec &spec, uint32_t mesh) {
  return std::ranges::find(spec.groups, mesh, &memory::GroupSpec::mesh)->name;
}

// The mesh that a rank names, as a message: a hash of the mesh's ranks, and the first of them.
struct NamedMesh {
  uint64_t hash = 0, first = 0;
  bool operator==(const NamedMesh &) const = default;
};

NamedMesh name_mesh(const layout::Mesh &mesh) {
  return {XXH3_64bits(mesh.ranks.data(), mesh.ranks.size() * sizeof mesh.ranks[0]), mesh.ranks.front()};
}

// Each rank is in the mesh that it names. So all ranks of a mesh name it if and only if the number of ranks that name
// it is its size.
bool covers(std::span<const NamedMesh> named, uint32_t size) {
  std::map<std::pair<uint64_t, uint64_t>, uint32_t> counts;
  for (const NamedMesh &one : named) ++counts[{one.hash, one.first}];
  return std::ranges::all_of(counts, [size](const auto &count) { return count.second == size; });
}

// Reports the first rank that is in another rank's mesh but names a different one. All ranks throw the same error.
[[noreturn]] void report_cover(transport::Team &team, const memory::ModelSpec &spec, uint32_t mesh) {
  ListWriter writer;
  writer.add(spec.meshes[mesh].ranks);
  std::vector<std::vector<uint32_t>> named;
  for (const auto &message : team.all_gather(std::span<const std::byte>(writer.message), "meshes that differ"))
    named.push_back(ListReader(message).numbers<uint32_t>());
  std::map<uint32_t, uint32_t> number_of;  // key: rank of the job; value: rank in the model
  for (uint32_t r = 0; r < team.size(); ++r) number_of[team.world_rank(r)] = r;
  for (uint32_t r = 0; r < team.size(); ++r)
    for (const uint32_t rank : named[r])
      if (const auto found = number_of.find(rank); found != number_of.end() && named[found->second] != named[r])
        fail_rank(FSDP_MISMATCH, static_cast<int32_t>(rank),
                  "fsdp_seal_model: group '{}': rank {} names the mesh {}, and rank {}, which is in it, names {}; the "
                  "meshes of a group must be disjoint, and each rank of a mesh must name it",
                  group_of(spec, mesh), team.world_rank(r), describe(named[r]), rank, describe(named[found->second]));
  fail(FSDP_INTERNAL, "fsdp_seal_model: the hashes of equal meshes differ");
}

// ---- parameters ----

// A parameter that several instances have, and its place in each of them.
struct Declared {
  uint32_t group, instance;
  uint64_t param;
};

bool overlap(const ParamIdentity &a, std::span<const uint64_t> shape_a, const ParamIdentity &b,
             std::span<const uint64_t> shape_b) {
  for (size_t d = 0; d < shape_a.size(); ++d)
    if (a.global_offset[d] >= b.global_offset[d] + shape_b[d] || b.global_offset[d] >= a.global_offset[d] + shape_a[d])
      return false;
  return true;
}

// The boxes with one name and one shape, sorted into cells of that shape. A box can overlap only with boxes of its own
// cell and of the neighbouring cells, so few pairs of boxes are compared.
class BoxGrid {
 public:
  using Cell = std::vector<uint64_t>;

  explicit BoxGrid(std::span<const uint64_t> shape) : shape_(shape.begin(), shape.end()) {}
  const std::vector<uint64_t> &shape() const { return shape_; }
  const Declared &first() const { return first_; }
  void add(const Declared &box, std::span<const uint64_t> offset) {
    if (cells_.empty()) first_ = box;
    cells_[cell_of(offset)].push_back(box);
  }
  // Visits the boxes near the offset.
  template <class Visit>
  void for_each_near(std::span<const uint64_t> offset, Visit &&visit) const {
    Cell cell = cell_of(offset);
    visit_cells(cell, 0, visit);
  }
  template <class Visit>
  void for_each(Visit &&visit) const {
    for (const auto &[cell, boxes] : cells_)
      for (const Declared &box : boxes) visit(box);
  }

 private:
  Cell cell_of(std::span<const uint64_t> offset) const {
    Cell cell;
    for (size_t d = 0; d < offset.size(); ++d) cell.push_back(offset[d] / std::max<uint64_t>(shape_[d], 1));
    return cell;
  }
  template <class Visit>
  void visit_cells(Cell &cell, size_t dimension, Visit &visit) const {
    if (dimension == cell.size()) {
      if (const auto found = cells_.find(cell); found != cells_.end())
        for (const Declared &box : found->second) visit(box);
      return;
    }
    const uint64_t middle = cell[dimension];
    for (uint64_t at = middle - std::min<uint64_t>(middle, 1); at <= middle + 1; ++at) {
      cell[dimension] = at;
      visit_cells(cell, dimension + 1, visit);
    }
    cell[dimension] = middle;
  }

  std::vector<uint64_t> shape_;
  Declared first_{};
  std::map<Cell, std::vector<Declared>> cells_;
};

class Instances {
 public:
  explicit Instances(memory::ModelSpec &spec) : spec_(spec) {}

  // Adds the message in which the first rank of a mesh describes its groups.
  void add(std::span<const std::byte> message) {
    ListReader reader(message);
    for (uint64_t count = reader.number(); count > 0; --count) {
      memory::GroupSpec &group = spec_.groups.at(reader.number());
      GroupInstance &instance = group.instances.emplace_back();
      instance.ranks = reader.numbers<uint32_t>();
      for (uint64_t params = reader.number(); params > 0; --params) {
        ParamIdentity &param = instance.params.emplace_back();
        param.name = reader.text();
        param.global_shape = reader.numbers<uint64_t>();
        param.global_offset = reader.numbers<uint64_t>();
      }
    }
  }

  // Finds for each parameter which instance counts it, and checks that instances go together.
  void finish() {
    for (uint32_t g = 0; g < spec_.groups.size(); ++g)
      for (uint32_t i = 0; i < spec_.groups[g].instances.size(); ++i)
        for (uint64_t p = 0; p < spec_.groups[g].params.size(); ++p) take({g, i, p});
  }

 private:
  const ParamIdentity &at(const Declared &declared) const {
    return spec_.groups[declared.group].instances[declared.instance].params[declared.param];
  }
  uint32_t rank_of(const Declared &declared) const {
    return spec_.groups[declared.group].instances[declared.instance].ranks.front();
  }
  std::span<const uint64_t> shape_of(const Declared &declared) const {
    return spec_.groups[declared.group].params[declared.param].shape;
  }
  bool is_own(const Declared &declared) const {
    const std::vector<uint32_t> &own = spec_.mesh_of(spec_.groups[declared.group]).ranks;
    return spec_.groups[declared.group].instances[declared.instance].ranks == own;
  }

  void take(const Declared &declared) {
    uint32_t counted_by = declared.instance;
    const auto compare = [&](const Declared &other) {
      check_pair(other, declared);
      if (other.group == declared.group && other.param == declared.param && at(other) == at(declared))
        counted_by = std::min(counted_by, other.instance);
    };
    std::vector<BoxGrid> &grids = by_name_[at(declared).name];
    BoxGrid *own = nullptr;
    for (BoxGrid &grid : grids) {
      // Throws if one of the two parameters is no box, or if their tensors have different shapes.
      compare(grid.first());
      if (std::ranges::equal(grid.shape(), shape_of(declared)))
        (own = &grid)->for_each_near(at(declared).global_offset, compare);
      else
        grid.for_each(compare);
    }
    if (!own) own = &grids.emplace_back(shape_of(declared));
    own->add(declared, at(declared).global_offset);
    if (is_own(declared)) spec_.groups[declared.group].counted_by.push_back(counted_by);
  }

  // Two parameters with one name are boxes of one tensor. These boxes must be equal or must not overlap.
  void check_pair(const Declared &a, const Declared &b) const {
    const ParamIdentity &first = at(a), &second = at(b);
    const auto refuse = [&](const std::string &what) {
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(rank_of(b)),
                "fsdp_seal_model: parameter '{}' of group '{}' on rank {} and of group '{}' on rank {}: {}", first.name,
                spec_.groups[a.group].name, rank_of(a), spec_.groups[b.group].name, rank_of(b), what);
    };
    if (first.global_shape.empty() || second.global_shape.empty())
      refuse(
          "two meshes have this name, and it is no box (global_shape) on one of them; give each mesh's parameter a "
          "name of its own, or say which part of one tensor it is");
    if (first.global_shape != second.global_shape)
      refuse(format_text("the tensors of which they are boxes have the shapes [{}] and [{}]",
                         fmt::join(first.global_shape, ", "), fmt::join(second.global_shape, ", ")));
    const bool equal = first == second && std::ranges::equal(shape_of(a), shape_of(b));
    if (equal && (a.group != b.group || a.param != b.param))
      refuse("they are the same box, but different parameters of their groups");
    if (equal) return check_factor(a.group, first.name);
    if (overlap(first, shape_of(a), second, shape_of(b)))
      refuse(format_text("the boxes from [{}] and from [{}] on overlap", fmt::join(first.global_offset, ", "),
                         fmt::join(second.global_offset, ", ")));
    if (all_groups_have_other_meshes()) check_factor(b.group, first.name);
  }

  // Ranks with equal copies or parts of a tensor may be tensor-parallel. Such ranks see the same data, so a mean over
  // all of them would be too small. Parts count as experts if the model has a dense group on its own mesh.
  void check_factor(uint32_t number, const std::string &param) const {
    const memory::GroupSpec &group = spec_.groups[number];
    if (!group.trainable()) return;
    const fsdp_grad_op op = group.grad_op ? group.grad_op : spec_.grad_op;
    if (op != FSDP_GRAD_OP_MEAN) return;
    fail(FSDP_INVALID_ARGUMENT,
         "fsdp_seal_model: group '{}': several meshes have boxes of '{}', so ranks may be tensor-parallel, and "
         "FSDP_GRAD_OP_MEAN would count all {} ranks of the model as data-parallel; give FSDP_GRAD_OP_FACTOR with 1 / "
         "(data-parallel ranks) in grad_op",
         group.name, param, spec_.mesh().size());
  }

  bool all_groups_have_other_meshes() const {
    return std::ranges::none_of(spec_.groups, [](const memory::GroupSpec &group) { return group.mesh == 0; });
  }

  memory::ModelSpec &spec_;
  std::map<std::string, std::vector<BoxGrid>> by_name_;
};

// The message in which the first rank of each mesh describes its groups to the others.
std::vector<std::byte> describe_own(const memory::ModelSpec &spec, uint32_t rank) {
  ListWriter writer;
  const auto is_first_of_mesh = [&](const memory::GroupSpec &group) {
    return group.mesh > 0 && spec.mesh_of(group).ranks.front() == rank;
  };
  writer.add(static_cast<uint64_t>(std::ranges::count_if(spec.groups, is_first_of_mesh)));
  for (uint64_t g = 0; g < spec.groups.size(); ++g) {
    const memory::GroupSpec &group = spec.groups[g];
    if (!is_first_of_mesh(group)) continue;
    writer.add(g);
    writer.add(spec.mesh_of(group).ranks);
    writer.add(group.params.size());
    for (const memory::ParamSpec &param : group.params) {
      writer.add(param.name);
      writer.add(param.global_shape);
      writer.add(param.global_offset);
    }
  }
  return writer.message;
}

}  // namespace

void check_meshes(transport::Team &team, const memory::ModelSpec &spec) {
  const size_t others = spec.meshes.size() - 1;
  if (others == 0) return;
  std::vector<NamedMesh> own;
  for (size_t mesh = 1; mesh <= others; ++mesh) own.push_back(name_mesh(spec.meshes[mesh]));
  std::vector<NamedMesh> all(others * team.size());
  team.all_gather(own.data(), others * sizeof own[0], all.data(), "the meshes of groups");
  std::vector<NamedMesh> named(team.size());
  for (uint32_t mesh = 1; mesh <= others; ++mesh) {
    for (uint32_t r = 0; r < team.size(); ++r) named[r] = all[r * others + mesh - 1];
    if (!covers(named, spec.meshes[mesh].size())) report_cover(team, spec, mesh);
  }
}

void number_meshes_alike(transport::Team &team, memory::ModelSpec &spec) {
  std::vector<uint32_t> own;
  for (const memory::GroupSpec &group : spec.groups) own.push_back(group.mesh);
  const auto bytes = std::as_bytes(std::span(own));
  if (team.agree({.same = XXH3_64bits(bytes.data(), bytes.size())}, "fsdp_seal_model: declarations").agreed()) return;
  const auto all = team.all_gather(bytes, "the numbers of meshes that differ");
  if (std::ranges::any_of(all, [&](const auto &numbers) { return numbers.size() != bytes.size(); })) return;
  std::map<std::vector<uint32_t>, uint32_t> numbers{{std::vector<uint32_t>(all.size(), 0), 0}};
  std::vector<layout::Mesh> meshes{spec.mesh()};
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    std::vector<uint32_t> on_ranks(all.size());
    for (size_t r = 0; r < all.size(); ++r)
      std::memcpy(&on_ranks[r], all[r].data() + g * sizeof on_ranks[r], sizeof on_ranks[r]);
    const auto [number, is_new] = numbers.emplace(std::move(on_ranks), static_cast<uint32_t>(meshes.size()));
    if (is_new) meshes.push_back(spec.mesh_of(spec.groups[g]));
    own[g] = number->second;
  }
  for (size_t g = 0; g < spec.groups.size(); ++g) spec.groups[g].mesh = own[g];
  spec.meshes = std::move(meshes);
}

void learn_instances(transport::Team &team, memory::ModelSpec &spec) {
  for (memory::GroupSpec &group : spec.groups) group.instances.clear(), group.counted_by.clear();
  if (spec.meshes.size() == 1) return;
  const std::vector<std::byte> own = describe_own(spec, team.world_rank(team.rank()));
  const auto all = team.all_gather(std::span<const std::byte>(own), "the parameters of groups with meshes");
  Instances instances(spec);
  for (const auto &message : all) instances.add(message);
  instances.finish();
}

}  // namespace fsdp::engine
