// A typed SSA tensor program over the ops of ops.h, always in canonical form once finished:
// tensors are numbered inputs first (in order), then outputs (in order), then intermediates in
// dependency order; nodes are in dependency order; nothing is dead.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dims.h"
#include "base/dtype.h"
#include "base/status.h"
#include "ir/ops.h"

namespace lawson::ir {

using TensorId = std::int32_t;
inline constexpr TensorId kNone = -1;  // an absent optional operand or result

struct Tensor {
  std::string name;
  DType dtype = DType::f32;
  Dims shape;
  Dims strides;           // elements; intermediates are contiguous
  int alignment = 16;     // bytes; what the caller promises for inputs and outputs
  bool by_value = false;  // a host scalar bound at run time

  // Run-time data, never part of a key:
  std::vector<double> values;  // the by-value scalar, or given contents of an input
  // For generated data of an integer input: inclusive bounds.
  std::optional<std::pair<std::int64_t, std::int64_t>> domain;
};

struct Node {
  Op op;
  std::vector<TensorId> inputs;  // fixed slots per op; kNone where optional and absent
  std::vector<TensorId> outputs;
  std::string source;  // where the caller wrote it ("mlp.cpp:12"); for messages, no part of a key
};

struct Graph {
  std::string name;
  bool strict = false;  // intermediates are rounded exactly as written
  std::vector<Tensor> tensors;
  std::vector<Node> nodes;
  std::int32_t input_count = 0;   // tensors [0, input_count)
  std::int32_t output_count = 0;  // tensors [input_count, input_count + output_count)

  bool is_input(TensorId id) const { return id >= 0 && id < input_count; }
  bool is_output(TensorId id) const { return id >= input_count && id < input_count + output_count; }
  // The binding number of inputs and outputs at the ABI and in cuDNN.
  static std::int64_t uid(TensorId id) { return std::int64_t{id} + 1; }
  const Tensor& tensor(TensorId id) const { return tensors[static_cast<std::size_t>(id)]; }
};

// Builds a graph op by op; every call checks operands and infers the result.
class Builder {
 public:
  explicit Builder(std::string name) { graph_.name = std::move(name); }

  void strict(bool value) { graph_.strict = value; }

  // Adds an input; empty strides mean contiguous. Checks dims, strides, overflow and the name.
  Result<TensorId> input(Tensor tensor);

  // Adds a node with its results. `dtype` overrides the inferred type of the first result;
  // names: one per result slot ("" = generated, for absent slots of optional results the flag
  // `wanted` is false and kNone is returned).
  struct ResultSpec {
    std::string name;
    std::optional<DType> dtype;
    bool wanted = true;
  };
  Result<std::vector<TensorId>> add(Op op, std::vector<TensorId> inputs,
                                    std::vector<ResultSpec> results);
  // One-result shorthand.
  Result<TensorId> add1(Op op, std::vector<TensorId> inputs,
                        std::optional<DType> dtype = std::nullopt, std::string name = {});

  // Where the ops that are added from now on were written.
  void source(std::string where) { source_ = std::move(where); }

  // Declares an output, with its layout in memory (empty strides: contiguous).
  Status output(TensorId id, Dims strides = {}, int alignment = 16);

  // The canonical graph, checked as a whole.
  Result<Graph> finish() &&;

  const Tensor& tensor(TensorId id) const { return graph_.tensor(id); }
  std::optional<TensorId> find(const std::string& name) const;

 private:
  struct Output {
    TensorId id;
    Dims strides;
    int alignment;
  };
  Graph graph_;
  std::string source_;
  std::vector<TensorId> inputs_;
  std::vector<Output> outputs_;
};

// Re-checks every invariant of a finished graph (types, shapes, order, liveness).
Status check(const Graph& graph);

// Canonical text: equal texts mean equal computations on equal layouts. Leaves out names and
// run-time data. The basis of every key.
std::string canonical_text(const Graph& graph);

std::string print(const Graph& graph);  // readable, one line per tensor or node
std::string to_dot(const Graph& graph);

}  // namespace lawson::ir
