// Writes fusion cases as graph documents, and knows of each value what may follow it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dims.h"
#include "base/dtype.h"
#include "base/json.h"

namespace lawson::cases {

// A tensor of the document. [low, high] is where most of its elements lie for normal inputs: what
// is drawn next keeps away from poles and overflow, so that the oracle has a bound for most
// elements.
struct Value {
  std::string name;
  DType dtype = DType::f32;
  Dims shape;
  double low = -4;
  double high = 4;

  double peak() const;
  std::int64_t count() const;
};

class Writer {
 public:
  explicit Writer(const std::string& name);

  Value input(DType dtype, const Dims& shape, const Dims& strides = {});
  void given(const Value& input, Json values);  // contents instead of random ones
  Value constant(double number, DType dtype);

  // One result; its field `dtype` is left out where it is the inferred one.
  Value op(std::string_view op, const std::vector<Value>& in, Value result, DType inferred,
           Json attributes = Json::object());
  // Several, by the names of slots and results; `in` and `out` are objects.
  void named(std::string_view op, Json in, Json out, Json attributes);
  std::string fresh() { return "t" + std::to_string(count_++); }

  Value unary(std::string_view name, const Value& x, Json attributes = Json::object());
  // Broadcasts; the wider type, or the one that is asked for.
  Value binary(std::string_view name, const Value& a, const Value& b,
               std::optional<DType> dtype = std::nullopt);
  Value clamp(const Value& x, double low, double high);
  Value convert(const Value& x, DType dtype);
  Value compare(std::string_view name, const Value& a, const Value& b);
  Value select(const Value& predicate, const Value& a, const Value& b);
  Value reduce(std::string_view kind, const Value& x, const Dims& axes, bool keepdims,
               std::optional<DType> dtype = std::nullopt);
  Value matmul(const Value& a, const Value& b, std::optional<DType> dtype = std::nullopt);
  Value reshape(const Value& x, const Dims& shape);
  Value transpose(const Value& x, const Dims& perm);

  void output(const Value& x, const Dims& strides = {}, int alignment = 16);
  bool may_be_output(const Value& x) const;  // it is computed, and no output yet
  void strict() { document_["strict"] = true; }

  // Ops so far, without constants, conversions and products.
  int counted() const { return counted_; }
  Json take() && { return std::move(document_); }

 private:
  Json document_;
  int count_ = 0;
  int counted_ = 0;
};

// Is `op` one that Writer::counted counts?
bool is_counted(std::string_view op);

// Of a shape with some axes reduced.
Dims reduced_shape(const Dims& shape, const Dims& axes, bool keepdims);

}  // namespace lawson::cases
