// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of conversions between checkpoints and weights of other programs.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "alone.h"
#include "base/error.h"
#include "base/failure.h"
#include "checkpoint/convert/convert.h"
#include "checkpoint/convert/inspect.h"
#include "checkpoint_bytes.h"
#include "device/device.h"
#include "system_faults.h"

namespace fsdp::checkpoint {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using namespace test_bytes;
using fsdp::test::FaultScope;
using fsdp::test::SystemFault;

struct Tensor {
  std::string type;
  std::vector<uint64_t> shape;
  Bytes bytes;
  bool operator==(const Tensor &) const = default;
};
using Tensors = std::map<std::string, Tensor>;

inline Tensor random_tensor(const std::string &type, std::vector<uint64_t> shape, uint32_t seed) {
  Bytes bytes(whole(shape).count() * find_element_type(type)->bits / 8);
  fill_random(bytes.data(), bytes.size(), seed);
  return {type, std::move(shape), std::move(bytes)};
}

inline FSDP_TEST_ALONE void turn(std::byte *to, const std::byte *from, uint64_t rows, uint64_t columns, uint64_t size) {
  for (uint64_t r = 0; r < rows; ++r)
    for (uint64_t c = 0; c < columns; ++c)
      for (uint64_t i = 0; i < size; ++i) to[(c * rows + r) * size + i] = from[(r * columns + c) * size + i];
}

// Transposes a matrix as defined.
inline Tensor turned(const Tensor &tensor) {
  Tensor result{tensor.type, {tensor.shape[1], tensor.shape[0]}, Bytes(tensor.bytes.size())};
  turn(result.bytes.data(), tensor.bytes.data(), tensor.shape[0], tensor.shape[1],
       find_element_type(tensor.type)->bits / 8);
  return result;
}

inline Tensor rows_of(const Tensor &tensor, uint64_t first, uint64_t count) {
  const size_t row = tensor.bytes.size() / tensor.shape[0];
  Tensor result{tensor.type, tensor.shape, {}};
  result.shape[0] = count;
  result.bytes.assign(tensor.bytes.begin() + static_cast<ptrdiff_t>(first * row),
                      tensor.bytes.begin() + static_cast<ptrdiff_t>((first + count) * row));
  return result;
}

// Writes a file as the format's description demands, without the library.
inline void write_foreign(const fs::path &path, const Tensors &tensors) {
  std::string header = "{", data;
  for (const auto &[name, tensor] : tensors) {
    header +=
        format_text(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", header.size() > 1 ? "," : "",
                    name, tensor.type, fmt::join(tensor.shape, ","), data.size(), data.size() + tensor.bytes.size());
    data.append(reinterpret_cast<const char *>(tensor.bytes.data()), tensor.bytes.size());
  }
  header += "}";
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char *>(&length), sizeof length);
  file << header << data;
}

class Convert : public testing::Test {
 protected:
  Convert() {
    std::string name = "/var/tmp/checkpoint-convert-XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~Convert() override { fs::remove_all(path); }

  std::string at(const std::string &name) const { return path + "/" + name; }

  // Reads all tensors of a folder of files, whole, with the library's reader.
  Tensors read(const std::string &folder) const {
    const WeightFiles files(folder);
    std::string sum;
    Tensors all;
    const AlignedBytes buffer(ShardReader::buffer_bytes);
    for (size_t f = 0; f < files.list(sum).size(); ++f) {
      const ShardReader reader = files.open(f);
      for (uint32_t i = 0; i < reader.header().tensors.size(); ++i) {
        const StoredTensor &stored = reader.header().tensors[i];
        Tensor tensor{std::string(stored.type->name), stored.shape, Bytes(stored.end - stored.begin)};
        const WantedBox wanted{i, whole(stored.shape), whole(stored.shape)};
        if (!tensor.bytes.empty())
          reader.read({&wanted, 1}, buffer.bytes(), [&](uint32_t, uint64_t to, std::span<const std::byte> elements) {
            std::memcpy(tensor.bytes.data() + to * stored.type->bits / 8, elements.data(), elements.size());
          });
        all[stored.name] = std::move(tensor);
      }
    }
    return all;
  }
  Converted import(const std::string &from, const std::vector<Rename> &renames = {}, uint64_t step = 7) const {
    return import_weights(at(from), at("runs"), renames, step, cast, [](uint64_t, uint64_t) {});
  }
  Converted consolidate_to(const std::string &out, const ConsolidateChoice &choice = {}) const {
    return consolidate(at("runs"), at(out), choice, cast, [](uint64_t, uint64_t) {});
  }
  // Saves a checkpoint of some ranks, which may cut the rows of every tensor at any place. half: each tensor is the
  // first half of a larger one, and the second half is not saved.
  void save_cut(const Tensors &tensors, uint32_t ranks, bool half = false) const {
    const Folder folder = Folder::make(at("runs"));
    NewCheckpoint made(folder);
    Manifest manifest;
    manifest.sequence = 1, manifest.step = 3, manifest.ranks = ranks, manifest.models = {{"", "cut", 1}};
    for (const auto &[name, tensor] : tensors)
      manifest.tensors.push_back({name, find_element_type(tensor.type), tensor.shape, {{whole(tensor.shape), {}}}});
    if (half)
      for (ManifestTensor &tensor : manifest.tensors) tensor.shape[0] *= 2;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      Tensors part;
      std::vector<ShardTensor> shards;
      for (size_t t = 0; auto &[name, tensor] : tensors) {
        const uint64_t rows = tensor.shape[0], first = rows * rank / ranks, end = rows * (rank + 1) / ranks;
        part[name] = rows_of(tensor, first, end - first);
        Box box = whole(tensor.shape);
        box.offset[0] = first, box.shape[0] = end - first;
        shards.push_back({name, find_element_type(tensor.type), box});
        manifest.tensors[t++].parts[0].add_rows(rank, end - first);
      }
      std::vector<ShardToWrite> shard;
      shard.push_back({made.make_folder(""), shard_name(rank), shard_name(rank), plan_shard_file(shards), {}});
      for (const uint32_t index : shard[0].file.order)
        shard[0].rows.push_back([&part, name = shards[index].name](uint64_t from, std::span<std::byte> to) {
          std::memcpy(to.data(), part.at(name).bytes.data() + from, to.size());
        });
      ShardWriter writer(std::move(shard), Staging::allocate());
      std::thread writing([&] { writer.write(); });
      writer.pack([] {});
      writing.join();
      manifest.files.push_back({shard_name(rank), writer.result()[0].bytes, writer.result()[0].header_sum});
    }
    made.commit(step_name(3), write_manifest(manifest), false);
  }
  // Returns the names of entries that did not exist before.
  std::vector<std::string> names(const std::string &folder = "") const {
    std::vector<std::string> all;
    for (const auto &entry : fs::directory_iterator(at(folder))) all.push_back(entry.path().filename());
    std::ranges::sort(all);
    return all;
  }

  std::string path;
  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 10'000};
  std::unique_ptr<device::Device> device = device::create_host_device({}, waiter, failure);
  CastElements cast = [this](void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
    device->transfer(to, to_dtype, from, from_dtype, count);
  };
};

#define EXPECT_SAYS(body, text) EXPECT_THAT_SAYS(message_of([&] { body; }), text)
inline void EXPECT_THAT_SAYS(const std::string &message, const std::string &text) {
  EXPECT_NE(message.find(text), std::string::npos) << message;
}

inline Tensors some_tensors() {
  return {{"wide", random_tensor("F32", {300, 7001}, 1)}, {"half", random_tensor("BF16", {12'345'67}, 2)},
          {"mask", random_tensor("U8", {1, 1, 5, 5}, 3)}, {"scalar", random_tensor("F64", {}, 4)},
          {"none", random_tensor("F32", {0, 4}, 5)},      {"cube", random_tensor("F16", {3, 50, 41}, 6)}};
}

inline Tensors fused_tensors() {
  return {{"h.0.q", random_tensor("F32", {24, 40}, 1)}, {"h.0.k", random_tensor("F32", {24, 16}, 2)},
          {"h.0.v", random_tensor("F32", {24, 16}, 3)}, {"wte", random_tensor("BF16", {100, 24}, 4)},
          {"both", random_tensor("F16", {25, 3}, 5)},   {"other", random_tensor("F32", {9}, 6)},
          {"conv", random_tensor("F32", {8, 50}, 7)}};
}

}  // namespace fsdp::checkpoint
