// What the tests of the reference engine share: a graph with its data, run and judged.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/judge.h"
#include "engine/reference/reference.h"
#include "ir/infer.h"
#include "ir/json.h"

namespace lawson {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// What a GPU does with f16 and bf16: f32 accumulation, probabilities stored in the operands' type.
inline constexpr Arithmetic kF32{0, 0x1p-24, 0, 0x1p-22};
inline constexpr Arithmetic kBf16Storage{0, 0x1p-24, 0x1p-8, 0x1p-22};

inline ir::Graph graph_from(const Json& document) {
  auto graph = ir::graph_from_json(document, "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

inline ir::Graph graph_of_case(const cases::Case& item) {
  auto graph = cases::graph_of(item);
  EXPECT_TRUE(graph.ok()) << item.text() << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

inline std::vector<double> values_of(const ir::Graph& graph, const plan::Buffer& buffer) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  std::vector<double> values;
  if (element_count(tensor.shape) == 0) return values;
  Dims index(tensor.shape.size(), 0);
  do {
    values.push_back(load_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides)));
  } while (next_index(index, tensor.shape));
  return values;
}

inline void set_values(const ir::Graph& graph, const plan::Buffer& buffer,
                       const std::vector<double>& values) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  if (values.empty()) return;
  Dims index(tensor.shape.size(), 0);
  std::size_t i = 0;
  do {
    store_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides), values[i++]);
  } while (next_index(index, tensor.shape));
}

// A graph with its data, run by the reference engine.
struct Bench {
  explicit Bench(ir::Graph g, std::uint64_t seed = 1,
                 plan::InputStyle style = plan::InputStyle::normal)
      : graph{std::move(g)}, engine{make_reference_engine()} {
    auto made = plan::make_inputs(graph, seed, *engine, style);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    inputs = std::move(*made);
    outputs = plan::make_outputs(graph);
  }

  void execute() {
    const Status status = try_execute();
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
  Status try_execute() {
    if (loaded == nullptr) {
      LAWSON_TRY(loaded, load(graph));
    }
    return engine->execute(*loaded, plan::bindings_of(inputs, outputs), nullptr, nullptr);
  }
  // Runs another graph of the same inputs and outputs on this data.
  void execute(const ir::Graph& other) {
    auto of_other = load(other);
    ASSERT_TRUE(of_other.ok()) << of_other.error().message;
    const Status status =
        engine->execute(**of_other, plan::bindings_of(inputs, outputs), nullptr, nullptr);
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
  Result<std::shared_ptr<Loaded>> load(const ir::Graph& of) {
    const Device device = cpu_device();
    LAWSON_TRY(const Plan plan, engine->compile(of, device, {}, std::nullopt, {}));
    return engine->load(plan, device);
  }
  std::vector<OracleOutput> oracle(const Arithmetic& arithmetic) {
    const auto bindings = plan::bindings_of(inputs, {});
    auto result = engine->oracle(graph, bindings, arithmetic);
    EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
    return std::move(*result);
  }
  plan::Comparison compare(const Arithmetic& arithmetic) {
    const auto expected = oracle(arithmetic);
    return plan::compare(graph, outputs, expected);
  }
  std::vector<double> input(std::size_t i) { return values_of(graph, inputs[i]); }
  std::vector<double> output(std::size_t i) { return values_of(graph, outputs[i]); }

  // By name; the tensor has to be there.
  plan::Buffer& input(const std::string& name) { return named(inputs, name); }
  plan::Buffer& output(const std::string& name) { return named(outputs, name); }
  std::vector<double> values(const std::string& name) {
    return values_of(graph, has(inputs, name) ? input(name) : output(name));
  }
  void set(const std::string& name, const std::vector<double>& to) {
    set_values(graph, has(inputs, name) ? input(name) : output(name), to);
  }
  bool has(const std::vector<plan::Buffer>& buffers, const std::string& name) const {
    return std::any_of(buffers.begin(), buffers.end(), [&](const plan::Buffer& buffer) {
      return graph.tensor(buffer.id()).name == name;
    });
  }
  plan::Buffer& named(std::vector<plan::Buffer>& buffers, const std::string& name) const {
    for (plan::Buffer& buffer : buffers) {
      if (graph.tensor(buffer.id()).name == name) return buffer;
    }
    ADD_FAILURE() << "no tensor " << name;
    return buffers.front();
  }

  ir::Graph graph;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Loaded> loaded;
  std::vector<plan::Buffer> inputs;
  std::vector<plan::Buffer> outputs;
};

inline void expect_values(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(actual[i])) << i;
    } else if (std::isinf(expected[i])) {
      EXPECT_EQ(actual[i], expected[i]) << i;
    } else {
      EXPECT_NEAR(actual[i], expected[i], 1e-14 * std::max(1.0, std::fabs(expected[i]))) << i;
    }
  }
}

inline Json attention(const Json& fields) {
  Json spec{{"lawson", 1},    {"kind", "attention"}, {"pass", "forward"}, {"dtype", "f64"},
            {"batch", 2},     {"heads", 4},          {"kv_heads", 2},     {"seqlen_q", 7},
            {"seqlen_kv", 9}, {"head_dim_qk", 6},    {"head_dim_v", 5},   {"return_stats", true}};
  spec.update(fields);
  if (spec["pass"] == "backward") spec.erase("return_stats");
  return spec;
}

inline ir::Graph attention_graph(const Json& fields) {
  return graph_of_case({"test", attention(fields), 1, plan::InputStyle::normal});
}

// An operand of attention: random where no values are given.
struct Operand {
  int slot;
  DType dtype;
  Dims shape;
  std::vector<double> values;

  bool is_finite() const {
    return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
  }
};

// A graph of one op with named slots, whose inputs and outputs have the names of their slots.
inline ir::Graph graph_of_op(const ir::Op& op, const std::vector<Operand>& operands,
                             const std::vector<std::string>& wanted) {
  ir::Builder builder("test");
  std::vector<ir::TensorId> in(ir::input_slots(op), ir::kNone);
  const auto names = ir::slot_names(op);
  for (const Operand& operand : operands) {
    const auto slot = static_cast<std::size_t>(operand.slot);
    ir::Tensor tensor;
    tensor.name = names[slot];
    tensor.dtype = operand.dtype;
    tensor.shape = operand.shape;
    if (operand.is_finite()) tensor.values = operand.values;
    tensor.by_value = tensor.name == "scale" || tensor.name == "sequences";
    auto id = builder.input(std::move(tensor));
    EXPECT_TRUE(id.ok()) << (id.ok() ? "" : id.error().message);
    in[slot] = *id;
  }
  std::vector<ir::Builder::ResultSpec> results;
  for (const std::string_view name : ir::result_names(op)) {
    const bool is_wanted = std::find(wanted.begin(), wanted.end(), name) != wanted.end();
    results.push_back({std::string{name}, std::nullopt, is_wanted});
  }
  if (results.empty()) results.push_back({wanted[0], std::nullopt, true});
  auto ids = builder.add(op, in, results);
  EXPECT_TRUE(ids.ok()) << (ids.ok() ? "" : ids.error().message);
  for (const ir::TensorId id : *ids) {
    if (id != ir::kNone) {
      EXPECT_TRUE(builder.output(id).ok());
    }
  }
  auto graph = std::move(builder).finish();
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

// The same with its data: also infinities, which no document can hold, and o and stats as given.
struct OpBench : Bench {
  OpBench(const ir::Op& op, const std::vector<Operand>& operands,
          const std::vector<std::string>& wanted)
      : Bench{graph_of_op(op, operands, wanted)} {
    const auto names = ir::slot_names(op);
    for (const Operand& operand : operands) {
      set(std::string{names[static_cast<std::size_t>(operand.slot)]}, operand.values);
    }
  }
};

}  // namespace lawson
