// What follows in a fusion, step by step: an op of the set by its name, with what keeps its
// operands away from poles and overflow.
#pragma once

#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/dice.h"
#include "cases/fusion_writer.h"

namespace lawson::cases {

// What is drawn from: everything, or what usual kernels have in their epilogues.
enum class Taste { everything, usual };

class Steps {
 public:
  Steps(Dice& dice, Taste taste, DType storage) : dice_{dice}, taste_{taste}, storage_{storage} {}

  // `count` ops (Writer::counted) behind x, some of whose results are outputs too.
  Value program(Writer& writer, Value x, int count);
  // The same in front of a product: x keeps its shape.
  Value before(Writer& writer, Value x, int count);
  // From now on other operands seldom broadcast.
  void full_operands() { full_operands_ = true; }
  // One op: a reduction over axes at random.
  Value exit_reduction(Writer& writer, const Value& x);

  // With strides at random: rows, columns, padded rows, repeated dims.
  Value input(Writer& writer, DType dtype, const Dims& shape);
  Dims strides(const Dims& shape, bool may_repeat);
  Dims axes(const Dims& shape);

 private:
  Value step(Writer& writer, const std::string& op, const Value& x);
  Value unary(Writer& writer, const std::string& op, Value x);
  Value gradient(Writer& writer, const std::string& op, const Value& x);
  Value binary(Writer& writer, const std::string& op, const Value& x);
  Value integer_binary(Writer& writer, const std::string& op, const Value& x);
  Value chosen(Writer& writer, const std::string& op, const Value& x);  // by predicates
  Value index(Writer& writer, const Value& x);
  Value converted(Writer& writer, const Value& x);
  // fusion_views.cpp
  Value view(Writer& writer, const std::string& op, const Value& x);
  Value reshaped(Writer& writer, const Value& x);
  Value sliced(Writer& writer, const Value& x);
  Value joined(Writer& writer, const Value& x);
  Value repeated(Writer& writer, const Value& x);
  Value reduced(Writer& writer, const std::string& op, const Value& x);
  Value reducible(Writer& writer, const std::string& kind, const Value& x);

  Value other(Writer& writer, const Value& x);  // an operand that broadcasts to x
  Value combine(Writer& writer, const Value& x, const Value& y);
  Value predicate(Writer& writer, const std::string& op, const Value& x);
  Value positive(Writer& writer, const Value& x);
  Value small(Writer& writer, const Value& x, double limit);

  Dice& dice_;
  Taste taste_;
  DType storage_;
  bool full_operands_ = false;
  std::vector<Value> earlier_;  // results that may be read again
};

// The names that Steps draws from.
const std::vector<std::string>& step_names(Taste taste, bool integers);

}  // namespace lawson::cases
