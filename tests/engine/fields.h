// SPDX-License-Identifier: Apache-2.0
// Fields of the header's structs by their names, as bindings/abi/abi.json describes them.
#pragma once

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace fields {

inline const nlohmann::json &described_abi() {
  static const nlohmann::json described = nlohmann::json::parse(std::ifstream(FSDP_TEST_ABI));
  return described;
}

inline const nlohmann::json &struct_named(const std::string &name) {
  for (const auto &one : described_abi()["structs"])
    if (one["name"] == name) return one;
  throw std::runtime_error("no struct " + name);
}

template <class T>
void poke(T &options, const std::string &of, const std::string &field, double value) {
  for (const auto &one : struct_named(of)["fields"]) {
    if (one["name"] != field) continue;
    auto *at = reinterpret_cast<char *>(&options) + one["offset"].get<size_t>();
    if (one["type"] == "double")
      std::memcpy(at, &value, sizeof value);
    else if (one["size"] == 8) {
      const auto whole = static_cast<uint64_t>(value);
      std::memcpy(at, &whole, sizeof whole);
    } else {
      const auto word = static_cast<uint32_t>(static_cast<int64_t>(value));
      std::memcpy(at, &word, sizeof word);
    }
  }
}

}  // namespace fields
