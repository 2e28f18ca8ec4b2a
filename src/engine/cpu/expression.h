// A fused group of pointwise ops: what is evaluated together, a row piece at a time, while the
// pieces are in the cache. Serves as a step of its own, as a matmul's epilogue (one value is then
// the matmul's accumulator) and as the operand of a matmul or a reduction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "engine/cpu/convert.h"
#include "engine/cpu/kernels.h"
#include "ir/graph.h"

namespace lawson::cpu {

// Memory that a plan knows: an input, an output or a piece of workspace, by number.
using Root = std::int32_t;

// Where a tensor's elements are: in memory, or computed from their index.
struct Location {
  enum class Kind : std::uint8_t { memory, constant, index };
  Kind kind = Kind::memory;
  Root root = -1;
  DType dtype = DType::f32;
  std::int64_t offset = 0;  // elements; kind index: the first value
  Dims strides;             // elements; kind index: steps of the value
  double constant = 0;

  bool operator==(const Location&) const = default;
};

// The location read at the indices of `shape` where the tensor of shape `own` broadcasts.
Location broadcast_location(const Location& location, const Dims& own, const Dims& shape);

struct Accumulator {  // the matmul's sum at this element
  bool operator==(const Accumulator&) const = default;
};

struct Apply {
  ir::Op op;                      // a pointwise one
  std::array<int, 3> operands{};  // numbers of earlier values
  bool integer = false;           // integer operands: division truncates
  bool operator==(const Apply&) const = default;
};

struct Value {
  std::variant<Location, Accumulator, Apply> from;
  DType dtype = DType::f32;  // rounded to it
};

struct Sink {  // where a value is stored
  int value = 0;
  Location to;
};

struct Expression {
  Dims shape;
  bool wide = false;  // computed in double: some dtype does not fit a float
  std::vector<Value> values;
  std::vector<Sink> sinks;
  int result = 0;  // the value that an operand's reader wants

  // The number of the value, added if it is new.
  int add(Value value);
  // 4-bit elements share bytes: such an expression is not split between threads.
  bool shares_bytes() const;
};

// Merges neighbouring axes that every value and sink steps through as if they were one. Not for
// expressions with an accumulator.
void merge_axes(Expression& expression);

inline constexpr std::int64_t kChunk = 256;  // elements evaluated at once

std::size_t evaluator_scratch(const Expression& expression);

template <typename T>
class Evaluator {
 public:
  // `roots` are base addresses; `scratch` has evaluator_scratch bytes. All must outlive this.
  Evaluator(const Kernels& kernels, const Expression& expression,
            const std::vector<std::byte*>& roots, std::byte* scratch);

  // Elements [index, index + count) of the last axis, count <= kChunk. `accumulator` has the
  // accumulators of these elements. Stores to the sinks and returns the result value.
  const T* run(const Dims& index, std::int64_t count, const T* accumulator = nullptr);

 private:
  const T* source(const Location& location, const Value& value, T* slot, const Dims& index,
                  std::int64_t count);
  void apply(const Apply& apply, const Value& value, T* slot, std::int64_t count);

  const Kernels& kernels_;
  const Expression& expression_;
  const std::vector<std::byte*>& roots_;
  T* slots_;
  std::vector<const T*> at_;
};

// Evaluates all of an expression that has no accumulator, on all threads.
Status run_expression(const Kernels& kernels, const Expression& expression,
                      const std::vector<std::byte*>& roots);

}  // namespace lawson::cpu
