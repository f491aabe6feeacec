// SPDX-License-Identifier: Apache-2.0
// nvcc's PTX in a form that can be run: parse() makes it from the text, and run_kernel() executes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

// Reports that a kernel has an operation that is not implemented here, or uses an address that is not its own.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

constexpr unsigned lanes = 32;  // threads of a warp, which share their instructions
using Mask = uint32_t;

struct Warp;
struct Instruction;
using Run = void (*)(const Instruction &, Warp &);

enum class Kind { plain, branch, barrier, leave };
enum class Space { global, parameter, shared, local };

// A register is named by the offset of its first lane in the warp's registers. A number in the text is also a register,
// which is filled once.
struct Instruction {
  Kind kind = Kind::plain;
  Run run = nullptr;
  std::array<uint32_t, 4> to{}, from{};
  uint32_t guard = 0;  // the register of a predicate
  bool guarded = false, guard_negated = false;
  uint32_t target = 0;  // target of a branch
  Space space = Space::global;
  // These are for accesses: the elements of a vector, the bytes of an element, and the bytes of its register.
  uint8_t count = 1, bytes = 0, register_bytes = 0;
  bool sign_extends = false;
  int64_t offset = 0;
  uint32_t line = 0;
};

struct Register {
  uint32_t at = 0, bytes = 0;  // bytes of one lane; 0: a predicate, which takes one
};

struct Constant {
  Register to;
  uint64_t value;
};

// A constant in global memory. All kernels of a text may read it.
class GlobalConstant {
 public:
  explicit GlobalConstant(std::vector<std::byte> bytes);
  ~GlobalConstant();
  GlobalConstant(const GlobalConstant &) = delete;
  GlobalConstant &operator=(const GlobalConstant &) = delete;
  const std::byte *data() const { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  std::vector<std::shared_ptr<const GlobalConstant>> globals;  // their addresses are among the constants
  std::vector<uint64_t> parameters;                            // size of each parameter
  std::vector<uint64_t> parameter_offsets;
  uint64_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  uint32_t register_bytes = 0;  // bytes for the registers of a warp
  // The number of the thread in its block, and the number of the block.
  Register thread, block;
};

using Module = std::map<std::string, Kernel, std::less<>>;

// Parses every kernel of a text. Throws Fault with the line if it meets something unknown.
Module parse(std::string_view text, const std::string &file);

}  // namespace ptx
