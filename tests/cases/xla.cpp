#include "cases/xla.h"

#include <array>
#include <functional>

#include "cases/fusion_writer.h"

namespace lawson::cases {
namespace {

using enum DType;

class List {
 public:
  // What `draw` returns is the output.
  XlaCase& add(const std::string& name, const std::function<Value(Writer&)>& draw) {
    Writer writer(name);
    const Value result = draw(writer);
    if (writer.may_be_output(result)) writer.output(result, output_strides_);
    output_strides_.clear();
    XlaCase item;
    item.item = {name, std::move(writer).take(), 11, plan::InputStyle::normal};
    cases.push_back(std::move(item));
    return cases.back();
  }
  void stored(Dims strides) { output_strides_ = std::move(strides); }  // of the next one

  std::vector<XlaCase> cases;

 private:
  Dims output_strides_;
};

// Braces keep the operands in order: a call's arguments have none.
Value dot(Writer& w, const std::array<Value, 2>& in, std::optional<DType> dtype = std::nullopt) {
  return w.matmul(in[0], in[1], dtype);
}

Value widened(Writer& w, const Value& x, const Dims& shape) {
  return w.op("broadcast", {x}, {"", x.dtype, shape, x.low, x.high}, x.dtype, {{"shape", shape}});
}

// Positive numbers, for functions that have no others.
Value positive_input(Writer& w, const Dims& shape) {
  Value x = w.input(f32, shape);
  Json values = Json::array();
  for (std::int64_t i = 0; i < x.count(); ++i) {
    values.push_back(static_cast<double>(i * 37 % 101 + 8) / 32);
  }
  w.given(x, std::move(values));
  return x;
}

// ---- products ----

void products(List& list) {
  list.add("xla-f32-dot", [](Writer& w) {
    return dot(w, {w.input(f32, {32, 96}), w.input(f32, {96, 64})});
  });
  // Dims of size 1 with the strides of the transposed vector.
  list.add("xla-vector-tensor", [](Writer& w) {
    const Value x = w.input(bf16, {1, 64}, {1, 1});
    return w.matmul(x, w.convert(w.input(i8, {64, 128}), bf16));
  });
  list.add("xla-tensor-vector", [](Writer& w) {
    const Value x = w.input(bf16, {256, 64}, {1, 256});
    return w.matmul(x, w.convert(w.input(i8, {64, 1}), bf16));
  });
  list.add("xla-bf16-with-copy", [](Writer& w) {
    const Value x = w.input(bf16, {3, 512, 64}, {512 * 64, 1, 512});
    return w.matmul(x, w.input(bf16, {3, 64, 512}));
  });
  list.add("xla-bf16-bf16-f32", [](Writer& w) {
    return dot(w, {w.input(bf16, {16, 32, 128}), w.input(bf16, {16, 128, 64})}, f32);
  });
  list.add("xla-s4-bf16", [](Writer& w) {
    const Value x = w.convert(w.input(i4, {3, 128, 128}), bf16);
    return w.matmul(x, w.input(bf16, {3, 128, 128}));
  });
  list.add("xla-output-subtraction", [](Writer& w) {
    const Value product = dot(w, {w.input(f32, {9, 32, 96}), w.input(f32, {9, 96, 64})});
    return w.binary("sub", w.input(f32, {9, 32, 64}), product);
  });
  list.stored({1, 32});
  list.add("xla-non-default-layouts", [](Writer& w) {
    return dot(w, {w.input(bf16, {32, 32}, {1, 32}), w.input(bf16, {32, 32}, {1, 32})});
  });
  list.add("xla-rhs-fusion", [](Writer& w) {
    const Value x = w.input(bf16, {5, 32, 96});
    return w.matmul(x, w.convert(w.input(i8, {5, 96, 16}), bf16));
  });
  list.add("xla-f16-negate", [](Writer& w) {
    const Value x = w.unary("neg", w.input(f16, {16, 32, 96}));
    return w.matmul(x, w.input(f16, {16, 96, 64}, {64 * 96, 1, 96}));
  });
  list.add("xla-s8-bf16", [](Writer& w) {
    const Value x = w.convert(w.input(i8, {5, 32, 96}), bf16);
    return w.matmul(x, w.input(bf16, {5, 96, 16}));
  });
  list.add("xla-exact-integer-math", [](Writer& w) {
    const Value product = dot(w, {w.input(i8, {16, 16}), w.input(i8, {16, 16})});
    return w.binary("add", product, w.input(i32, {16, 16}));
  });
  list.add("xla-odd-dimensions", [](Writer& w) {
    const Value x = w.unary("neg", w.input(f16, {20, 40, 61}));
    return w.matmul(x, w.input(f16, {20, 61, 80}, {80 * 61, 1, 61}));
  });
  list.add("xla-autotuning-s8-bf16", [](Writer& w) {
    const Value x = w.input(bf16, {2, 720, 720});
    return w.matmul(x, w.convert(w.input(i8, {2, 720, 720}), bf16));
  });
  XlaCase& f64_dot = list.add("xla-f64-not-supported", [](Writer& w) {
    const Value x = w.unary("neg", w.input(f64, {20, 40, 64}));
    return w.matmul(x, w.input(f64, {20, 64, 80}, {80 * 64, 1, 64}));
  });
  f64_dot.expected = Decision::unsupported;
  f64_dot.executable = false;
}

// ---- broadcasts, constants, views ----

void operands(List& list) {
  const auto with_operand = [&](const char* name, const Dims& shape, const Dims& spread) {
    list.add(name, [&](Writer& w) {
      const Value x = w.input(f16, {16, 32, 128});
      const Value y = w.input(f16, {16, 128, 64});
      Value z = w.input(f16, shape);
      if (spread != shape) z = w.reshape(z, spread);
      return w.matmul(w.binary("add", x, widened(w, z, {16, 32, 128})), y);
    });
  };
  list.add("xla-broadcast-dim0", [](Writer& w) {
    const Value x = widened(w, w.input(bf16, {32, 128}), {5, 32, 128});
    return w.matmul(x, w.input(bf16, {5, 128, 64}), f32);
  });
  with_operand("xla-broadcast-dim1", {16, 128}, {16, 1, 128});
  with_operand("xla-broadcast-dim2", {16, 32}, {16, 32, 1});
  with_operand("xla-broadcast-2-dims", {128}, {128});
  with_operand("xla-broadcast-3-dims", {}, {});
  list.add("xla-constants", [](Writer& w) {
    const Value below = widened(w, w.constant(-1, bf16), {16, 32});
    const Value x = w.binary("min", w.input(bf16, {16, 32}), below);
    const Value number = widened(w, w.constant(-2, i32), {32, 16});
    const Value y = w.binary("min", w.input(bf16, {32, 16}), w.convert(number, bf16));
    const Value zero = widened(w, w.constant(0, f32), {16, 16});
    return w.binary("max", w.matmul(x, y, f32), zero);
  });
  list.add("xla-clamp", [](Writer& w) {
    const Value x = w.clamp(w.input(bf16, {16, 32}), 3e-3, 0.1);
    return w.matmul(x, w.clamp(w.input(bf16, {32, 16}), 3e-3, 0.1), f32);
  });
  list.add("xla-fp8", [](Writer& w) {
    const Value x = w.input(f8e4m3, {16, 32});
    const Value product = w.matmul(x, w.input(f8e4m3, {32, 16}), f32);
    const Value x_scale = w.input(f32, {});
    const Value scale = w.binary("mul", x_scale, w.input(f32, {}));
    return w.binary("mul", product, widened(w, scale, {16, 16}));
  });
  list.add("xla-slicing", [](Writer& w) {
    const Value x = w.op("slice", {w.input(f16, {11, 23, 64})}, {"", f16, {8, 16, 64}}, f16,
                         {{"start", {1, 3, 0}}, {"limit", {9, 19, 64}}});
    return w.matmul(x, w.input(f16, {8, 64, 32}));
  });
  // The rows of A are three dims in memory of which only two are neighbours: the third one becomes
  // a batch dim.
  const auto split = [](Writer& w) {
    const Value x = w.input(i8, {4, 3, 16, 400}, {3 * 16 * 400, 16, 1, 48});
    const Value y = w.transpose(w.reshape(w.input(bf16, {1, 128, 400}), {128, 400}), {1, 0});
    return w.matmul(w.convert(w.reshape(x, {192, 400}), bf16), y);
  };
  list.add("xla-split-input", split);
  list.stored({3 * 16 * 128, 16, 1, 48});
  list.add("xla-split-input-output", [&](Writer& w) {
    return w.reshape(split(w), {4, 3, 16, 128});
  });
}

// ---- pointwise ops on B ----

void elementwise(List& list) {
  const auto on_b = [&](const std::string& name, const std::function<Value(Writer&)>& b) {
    list.add(name, [&](Writer& w) {
      const Value x = w.input(f32, {32, 32});
      return w.matmul(x, w.convert(b(w), f32));
    });
  };
  const Dims shape{32, 32};
  for (const std::string op : {"abs", "ceil", "cos", "exp", "floor", "log", "neg", "rsqrt", "sin",
                               "sqrt", "tan", "tanh"}) {
    const bool is_positive = op == "log" || op == "rsqrt" || op == "sqrt";
    on_b("xla-unary-" + op, [&](Writer& w) {
      return w.unary(op, is_positive ? positive_input(w, shape) : w.input(f32, shape));
    });
  }
  for (const std::string op : {"add", "div", "max", "min", "mul", "pow", "sub"}) {
    on_b("xla-binary-" + op, [&](Writer& w) {
      const Value a = op == "pow" ? positive_input(w, shape) : w.input(f32, shape);
      return w.binary(op, a, w.input(f32, shape));
    });
  }
  for (const DType dtype : {boolean, i8, i32, f16, f32}) {
    for (const std::string kind : {"eq", "ne", "ge", "gt", "le", "lt"}) {
      on_b(fmt::format("xla-compare-{}-{}", to_string(dtype), kind), [&](Writer& w) {
        const Value a = w.input(dtype, shape);
        return w.compare("compare_" + kind, a, w.input(dtype, shape));
      });
    }
  }
  for (const DType dtype : {f16, f32, bf16}) {
    on_b(fmt::format("xla-select-{}", to_string(dtype)), [&](Writer& w) {
      const Value a = w.input(dtype, shape);
      const Value b = w.input(dtype, shape);
      return w.select(w.input(boolean, shape), a, b);
    });
  }
}

// ---- block scales ----

void block_scaled(List& list) {
  for (const char* target : {"b200", "h200"}) {
    Writer w(fmt::format("xla-block-scaled-dot-{}", target));
    const Value a = w.input(f8e4m3, {256, 128});
    const Value b = w.input(f8e4m3, {128, 384}, {1, 128});
    const Value a_scale = w.input(f8e8m0, {256, 4});
    const Value b_scale = w.input(f8e8m0, {4, 384}, {1, 4});
    w.named("scaled_matmul",
            {{"a", a.name}, {"b", b.name}, {"a_scale", a_scale.name}, {"b_scale", b_scale.name}},
            "product", {{"block", 32}, {"swizzled", true}});
    w.output({"product", f32, {256, 384}});
    XlaCase item;
    item.item = {fmt::format("xla-block-scaled-dot-{}", target), std::move(w).take(), 11,
                 plan::InputStyle::normal};
    item.target = target;
    if (item.target == "h200") {
      item.expected = Decision::unsupported;
      item.code = "compute_capability";
    }
    item.executable = false;
    list.cases.push_back(std::move(item));
  }
}

// ---- what XLA's tests leave out ----

void activations(List& list) {
  const auto parameter = [](const std::string& kind) {
    if (kind == "leaky_relu") return Json{{"slope", 0.125}};
    if (kind == "elu") return Json{{"alpha", 0.75}};
    return Json(Json::object());
  };
  for (const std::string kind : {"tanh", "sigmoid", "relu", "leaky_relu", "relu6", "elu",
                                 "softplus", "silu", "gelu", "gelu_tanh"}) {
    list.add("own-bias-" + kind, [&](Writer& w) {
      const Value x = w.input(bf16, {2, 64, 96});
      const Value product = w.matmul(x, w.input(bf16, {2, 96, 64}), f32);
      const Value biased = w.binary("add", product, w.convert(w.input(bf16, {1, 1, 64}), f32));
      return w.convert(w.unary(kind, biased, parameter(kind)), bf16);
    });
    list.add("own-backward-" + kind, [&](Writer& w) {
      const Value dy = w.input(bf16, {2, 64, 96});
      const Value product = w.matmul(dy, w.input(bf16, {2, 96, 64}), f32);
      const Value x = w.convert(w.input(bf16, {2, 64, 64}), f32);
      const Value dx =
          w.op(kind + "_grad", {product, x}, {"", f32, {2, 64, 64}}, f32, parameter(kind));
      return w.convert(dx, bf16);
    });
  }
}

void reductions(List& list) {
  for (const std::string kind : {"sum", "max", "min", "amax", "norm1", "mean", "norm2", "prod"}) {
    for (const Dims& axes : {Dims{2}, Dims{1}, Dims{0, 1, 2}}) {
      std::string where;
      for (const std::int64_t axis : axes) where += std::to_string(axis);
      XlaCase& item = list.add(fmt::format("own-reduce-{}-{}", kind, where), [&](Writer& w) {
        const Value x = w.input(bf16, {2, 32, 64});
        Value product = w.matmul(x, w.input(bf16, {2, 64, 32}), f32);
        if (kind == "prod") product = w.clamp(product, 0.5, 1.5);
        return w.reduce(kind, product, axes, true);
      });
      if (kind != "norm2") continue;  // nothing, and so no square root, follows a reduction
      item.expected = Decision::unsupported;
      item.code = "op_not_in_cudnn";
      item.executable = false;
    }
  }
}

}  // namespace

std::vector<XlaCase> xla_list() {
  List list;
  products(list);
  operands(list);
  elementwise(list);
  block_scaled(list);
  activations(list);
  reductions(list);
  return std::move(list.cases);
}

std::vector<Case> xla_cases() {
  std::vector<Case> cases;
  for (XlaCase& item : xla_list()) cases.push_back(std::move(item.item));
  return cases;
}

}  // namespace lawson::cases
