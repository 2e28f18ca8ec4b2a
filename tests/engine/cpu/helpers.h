// Graphs, memory and execution for the tests of the CPU engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/cpu/cpu.h"
#include "engine/cpu/kernels.h"
#include "ir/graph.h"

namespace lawson::cpu {

inline std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> result;
  for (int i = 0; i < kIsaCount; ++i) {
    if (const Kernels* kernels = kernels_for(static_cast<Isa>(i))) result.push_back(kernels);
  }
  return result;
}

template <typename T>
T expect_value(Result<T> result) {
  if (!result.ok()) {
    ADD_FAILURE() << result.error().message;
    std::abort();
  }
  return std::move(result).value();
}

// A builder that fails the test instead of returning errors.
class GraphOf {
 public:
  ir::TensorId input(const std::string& name, DType dtype, Dims shape, Dims strides = {}) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.strides = std::move(strides);
    return expect_value(builder_.input(std::move(tensor)));
  }
  ir::TensorId scalar(const std::string& name, double value, DType dtype = DType::f32) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = {1, 1, 1, 1};
    tensor.by_value = true;
    tensor.values = {value};
    return expect_value(builder_.input(std::move(tensor)));
  }
  ir::TensorId op(ir::Op op, std::vector<ir::TensorId> inputs,
                  std::optional<DType> dtype = std::nullopt) {
    return expect_value(builder_.add1(std::move(op), std::move(inputs), dtype));
  }
  // The first `results` of an op with several.
  std::vector<ir::TensorId> ops(ir::Op op, std::vector<ir::TensorId> inputs, std::size_t results) {
    std::vector<ir::Builder::ResultSpec> specs(results);
    auto ids = expect_value(builder_.add(std::move(op), std::move(inputs), std::move(specs)));
    ids.resize(results);
    return ids;
  }
  // Results in their slots; kNone where not wanted.
  std::vector<ir::TensorId> results(ir::Op op, std::vector<ir::TensorId> inputs,
                                    const std::vector<bool>& wanted) {
    std::vector<ir::Builder::ResultSpec> specs;
    for (const bool want : wanted) specs.push_back({{}, std::nullopt, want});
    return expect_value(builder_.add(std::move(op), std::move(inputs), std::move(specs)));
  }
  const ir::Tensor& tensor(ir::TensorId id) const { return builder_.tensor(id); }
  // Declares an output with a layout of its own.
  void output(ir::TensorId id, Dims strides) {
    const Status status = builder_.output(id, std::move(strides));
    EXPECT_TRUE(status.ok()) << status.error().message;
  }
  ir::Graph finish(const std::vector<ir::TensorId>& outputs = {}) {
    for (const ir::TensorId id : outputs) {
      const Status status = builder_.output(id);
      EXPECT_TRUE(status.ok()) << status.error().message;
    }
    return expect_value(std::move(builder_).finish());
  }

 private:
  ir::Builder builder_{"test"};
};

// Attention's operands by slot; the others are absent.
inline std::vector<ir::TensorId> operands(
    std::initializer_list<std::pair<ir::AttentionSlots::Shared, ir::TensorId>> given) {
  std::vector<ir::TensorId> result(ir::AttentionSlots::kShared, ir::kNone);
  for (const auto& [slot, id] : given) result[slot] = id;
  return result;
}

// The operands of a backward: those that it shares with the forward, then its own.
inline std::vector<ir::TensorId> backward_operands(std::vector<ir::TensorId> shared, ir::TensorId o,
                                                   ir::TensorId dout, ir::TensorId stats) {
  shared.resize(ir::AttentionSlots::kShared, ir::kNone);
  shared.insert(shared.end(), {o, dout, stats});
  return shared;
}

// Memory for a graph's inputs and outputs, and a loaded plan.
class Execution {
 public:
  explicit Execution(ir::Graph graph, const std::string& kernels = {},
                     std::shared_ptr<Engine> engine = make_cpu_engine())
      : graph_{std::move(graph)}, engine_{std::move(engine)} {
    std::optional<Candidate> candidate;
    for (const Candidate& c : expect_value(engine_->candidates(graph_, cpu_device(), {}))) {
      if (!kernels.empty() && c.name.ends_with("-" + kernels)) candidate = c;
    }
    const Plan plan =
        expect_value(engine_->compile(graph_, cpu_device(), {}, candidate, std::stop_token{}));
    loaded_ = expect_value(engine_->load(plan, cpu_device()));
    for (ir::TensorId id = 0; id < graph_.input_count + graph_.output_count; ++id) {
      const ir::Tensor& tensor = graph_.tensor(id);
      memory_.emplace_back(
          byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0)));
      data_.push_back(memory_.back().data());
    }
  }

  // Standard normal values (integers: rounded multiples of 10).
  void fill(std::uint64_t seed) {
    std::mt19937_64 random{seed};
    std::normal_distribution<double> normal;
    for (ir::TensorId id = 0; id < graph_.input_count; ++id) {
      const ir::Tensor& tensor = graph_.tensor(id);
      if (tensor.by_value) {
        set(id, 0, tensor.values[0]);
        continue;
      }
      const std::int64_t extent = storage_extent(tensor.shape, tensor.strides).value_or(0);
      for (std::int64_t i = 0; i < extent; ++i) {
        const double value = normal(random);
        set(id, i, is_integer(tensor.dtype) ? std::rint(10 * value) : value);
      }
    }
  }

  void set(ir::TensorId id, std::int64_t at, double value) {
    store_element(data(id), graph_.tensor(id).dtype, at, value);
  }
  double at(ir::TensorId id, std::int64_t at) const {
    return load_element(data_[static_cast<std::size_t>(id)], graph_.tensor(id).dtype, at);
  }
  std::byte* data(ir::TensorId id) { return data_[static_cast<std::size_t>(id)]; }
  // Other memory than our own from now on.
  void bind(ir::TensorId id, std::byte* data) { data_[static_cast<std::size_t>(id)] = data; }
  // The tensor's first elements in memory.
  void set_all(ir::TensorId id, const std::vector<double>& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      set(id, static_cast<std::int64_t>(i), values[i]);
  }
  const std::vector<std::byte>& bytes(ir::TensorId id) const {
    return memory_[static_cast<std::size_t>(id)];
  }
  ir::TensorId output(int i = 0) const { return graph_.input_count + i; }
  const ir::Graph& graph() const { return graph_; }
  const Plan& plan() const { return loaded_->plan(); }
  Engine& engine() { return *engine_; }
  const Loaded& loaded() const { return *loaded_; }

  std::vector<Binding> bindings() {
    std::vector<Binding> result;
    for (ir::TensorId id = 0; id < graph_.input_count + graph_.output_count; ++id) {
      result.push_back({ir::Graph::uid(id), data(id)});
    }
    return result;
  }

  void run() {
    const Status status = try_run();
    EXPECT_TRUE(status.ok()) << status.error().message;
  }

  // The workspace is exactly as large as the plan says, at an odd address, between canaries.
  Status try_run() {
    const auto bytes = static_cast<std::size_t>(plan().workspace_bytes);
    std::vector<std::byte> workspace(bytes + 2, std::byte{0x5a});
    Status status = engine_->execute(*loaded_, bindings(), workspace.data() + 1, nullptr);
    EXPECT_EQ(workspace.front(), std::byte{0x5a});
    EXPECT_EQ(workspace.back(), std::byte{0x5a});
    return status;
  }

 private:
  ir::Graph graph_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Loaded> loaded_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> data_;  // memory_, or what was bound instead
};

}  // namespace lawson::cpu
