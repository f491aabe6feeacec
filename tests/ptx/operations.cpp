// SPDX-License-Identifier: Apache-2.0
#include "ptx/operations.h"

#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "ptx/arithmetic.h"
#include "ptx/warp.h"

namespace ptx {
namespace {

template <class T>
constexpr uint8_t bytes_of = sizeof(T);

// Runs the operation on all lanes. The compiler turns the loop into vector instructions.
template <class Op, class To, class... From, size_t... k>
void run_lanes(const Instruction &i, Warp &warp, std::index_sequence<k...>) {
  To *const to = warp.lane<To>(i.to[0]);
  const std::tuple<const From *...> from{warp.lane<From>(i.from[k])...};
  if (warp.active == ~Mask{0}) {
    for (unsigned lane = 0; lane < lanes; ++lane) to[lane] = Op()(std::get<k>(from)[lane]...);
  } else {
    each_lane(warp.active, [&](unsigned lane) { to[lane] = Op()(std::get<k>(from)[lane]...); });
  }
}

template <class Op, class To, class... From>
void run(const Instruction &i, Warp &warp) {
  run_lanes<Op, To, From...>(i, warp, std::index_sequence_for<From...>());
}

// Splits a register of 32 bits into two of 16 bits.
template <class Whole, class Half>
void split(const Instruction &i, Warp &warp) {
  const Whole *const from = warp.lane<Whole>(i.from[0]);
  each_lane(warp.active, [&](unsigned lane) {
    warp.lane<Half>(i.to[0])[lane] = static_cast<Half>(from[lane]);
    warp.lane<Half>(i.to[1])[lane] = static_cast<Half>(from[lane] >> 8 * sizeof(Half));
  });
}

class Table {
 public:
  Table();
  std::unordered_map<std::string, Operation> of;

 private:
  template <class Op, class To, class... From>
  void add(const std::string &name) {
    of[name] = {run<Op, To, From...>, {bytes_of<To>}, {bytes_of<From>...}};
  }
  template <class T>
  void add_integer(const std::string &type);
  template <class T>
  void add_bits(const std::string &type);
  template <class T>
  void add_float(const std::string &type);
  template <class T>
  void add_order(const std::string &type);
  void add_predicates();
  void add_conversions();
};

template <class T>
void Table::add_order(const std::string &type) {
  add<Equal, Predicate, T, T>("setp.eq." + type);
  add<Opposite<Equal>, Predicate, T, T>((std::is_floating_point_v<T> ? "setp.neu." : "setp.ne.") + type);
  add<Below, Predicate, T, T>("setp.lt." + type);
  add<AtMost, Predicate, T, T>("setp.le." + type);
  add<Swapped<Below>, Predicate, T, T>("setp.gt." + type);
  add<Swapped<AtMost>, Predicate, T, T>("setp.ge." + type);
}

// Signed and unsigned integers differ in comparisons and divisions.
template <class T>
void Table::add_integer(const std::string &type) {
  add_order<T>(type);
  add<Add, T, T, T>("add." + type);
  add<Subtract, T, T, T>("sub." + type);
  add<Negate, T, T>("neg." + type);
  add<Least, T, T, T>("min." + type);
  add<Most, T, T, T>("max." + type);
  add<Itself, T, T>("mov." + type);
  add<Select, T, T, T, Predicate>("selp." + type);
  add<ShiftRight, T, T, uint32_t>("shr." + type);
  if constexpr (sizeof(T) > 2) {
    add<Multiply, T, T, T>("mul.lo." + type);
    add<MultiplyAdd, T, T, T, T>("mad.lo." + type);
  }
  if constexpr (std::is_unsigned_v<T> && sizeof(T) > 2) {
    add<Divide, T, T, T>("div." + type);
    add<Remainder, T, T, T>("rem." + type);
  }
}

template <class T>
void Table::add_bits(const std::string &type) {
  add<And, T, T, T>("and." + type);
  add<Or, T, T, T>("or." + type);
  add<Xor, T, T, T>("xor." + type);
  add<Not, T, T>("not." + type);
  add<ShiftLeft, T, T, uint32_t>("shl." + type);
  add<Itself, T, T>("mov." + type);
  add<Select, T, T, T, Predicate>("selp." + type);
  add<Equal, Predicate, T, T>("setp.eq." + type);
  add<Opposite<Equal>, Predicate, T, T>("setp.ne." + type);
}

template <class T>
void Table::add_float(const std::string &type) {
  add_order<T>(type);
  add<OrderedUnequal, Predicate, T, T>("setp.ne." + type);
  add<Opposite<OrderedUnequal>, Predicate, T, T>("setp.equ." + type);
  add<Opposite<Swapped<Below>>, Predicate, T, T>("setp.leu." + type);
  add<Opposite<AtMost>, Predicate, T, T>("setp.gtu." + type);
  add<Opposite<Swapped<AtMost>>, Predicate, T, T>("setp.ltu." + type);
  add<Opposite<Below>, Predicate, T, T>("setp.geu." + type);
  add<Add, T, T, T>("add.rn." + type);
  add<Subtract, T, T, T>("sub.rn." + type);
  add<Multiply, T, T, T>("mul.rn." + type);
  add<Divide, T, T, T>("div.rn." + type);
  add<Root, T, T>("sqrt.rn." + type);
  add<Itself, T, T>("mov." + type);
  add<Select, T, T, T, Predicate>("selp." + type);
}

void Table::add_predicates() {
  add<And, Predicate, Predicate, Predicate>("and.pred");
  add<Or, Predicate, Predicate, Predicate>("or.pred");
  add<Xor, Predicate, Predicate, Predicate>("xor.pred");
  add<Opposed, Predicate, Predicate>("not.pred");
  add<Itself, Predicate, Predicate>("mov.pred");
}

void Table::add_conversions() {
  add<Convert<uint32_t>, uint32_t, uint16_t>("cvt.u32.u16");
  add<Convert<uint16_t>, uint16_t, uint32_t>("cvt.u16.u32");
  add<Convert<int32_t>, int32_t, int16_t>("cvt.s32.s16");
  add<Convert<uint32_t>, uint32_t, uint64_t>("cvt.u32.u64");
  add<Convert<uint64_t>, uint64_t, uint32_t>("cvt.u64.u32");
  add<Convert<double>, double, float>("cvt.f64.f32");
  add<Convert<float>, float, double>("cvt.rn.f32.f64");
  add<Narrow<fsdp::test::e4m3>, uint16_t, float, float>("cvt.rn.satfinite.e4m3x2.f32");
  add<Narrow<fsdp::test::e5m2>, uint16_t, float, float>("cvt.rn.satfinite.e5m2x2.f32");
  add<NarrowBf16, uint32_t, float, float>("cvt.rn.bf16x2.f32");
  add<Itself, uint64_t, uint64_t>("cvta.to.global.u64");  // a generic address equals the global address
}

Table::Table() {
  add_integer<uint16_t>("u16"), add_integer<int16_t>("s16");
  add_integer<uint32_t>("u32"), add_integer<int32_t>("s32");
  add_integer<uint64_t>("u64"), add_integer<int64_t>("s64");
  add_bits<uint16_t>("b16"), add_bits<uint32_t>("b32"), add_bits<uint64_t>("b64");
  add_float<float>("f32"), add_float<double>("f64");
  add_predicates();
  add_conversions();
  add<MultiplyWide, uint64_t, uint32_t, uint32_t>("mul.wide.u32");
  add<MultiplyWide, uint32_t, uint16_t, uint16_t>("mul.wide.u16");
  add<MultiplyHigh, uint32_t, uint32_t, uint32_t>("mul.hi.u32");
  add<Magnitude, float, float>("abs.f32");
  add<WithSign, float, float, float>("copysign.f32");
  add<MostOrNan, float, float, float>("max.NaN.f32");
  add<CountOnes, uint32_t, uint32_t>("popc.b32");
  add<ExtractBits, uint32_t, uint32_t, uint32_t, uint32_t>("bfe.u32");
  add<InsertBits, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>("bfi.b32");
  add<InsertBits, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>("bfi.b64");
  add<Permute, uint32_t, uint32_t, uint32_t, uint32_t>("prmt.b32");
  // These names are ours, for forms that PTX expresses by operands.
  add<Combine, uint32_t, uint16_t, uint16_t>("mov.b32.combine");
  of["mov.b32.split"] = {split<uint32_t, uint16_t>, {2, 2}, {4}};
  of["mov.b64.split"] = {split<uint64_t, uint32_t>, {4, 4}, {8}};
  add<Nanoseconds, uint64_t>("mov.u64.globaltimer");
}

}  // namespace

std::optional<Operation> find_operation(std::string_view name) {
  static const Table table;
  const auto found = table.of.find(std::string(name));
  if (found == table.of.end()) return std::nullopt;
  return found->second;
}

}  // namespace ptx
