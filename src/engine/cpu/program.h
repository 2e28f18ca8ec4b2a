// What a graph becomes: a list of steps over known pieces of memory. Pointwise ops join the step
// that produces their operand where they can: a matmul's epilogue, another pointwise group, or the
// operand of the matmul or reduction that reads them. Views (reshape, transpose, slice, broadcast)
// become strides; what is concatenated is stored in its place in the result at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "engine/cpu/expression.h"
#include "engine/cpu/kernels.h"
#include "ir/graph.h"

namespace lawson::cpu {

struct PointwiseStep {
  Expression expression;
};

// The scales of a scaled_matmul's operand: one for `block` neighbours along k.
struct BlockScales {
  Location at;  // strides per axis of the operand, along k per block
  std::int64_t block = 1;
  std::int64_t tiles_per_row = 0;  // swizzled (ops.h): tiles along k; 0: not swizzled
};

// C[batch, m, n] = A[batch, m, k] B[batch, k, n]. An operand is read element by element from the
// result of an expression over its own shape; the epilogue runs over the shape of C.
struct MatmulStep {
  enum class Compute : std::uint8_t { f32, f64, i32 };
  Compute compute = Compute::f32;
  Expression a;
  Expression b;
  Expression epilogue;
  std::int64_t k = 0;
  std::optional<BlockScales> a_scales;
  std::optional<BlockScales> b_scales;
};

struct ReduceStep {
  ir::ReduceKind kind{};
  Expression operand;
  std::vector<bool> reduced;  // per axis of the operand
  Location to;                // strides per axis of the operand, 0 where reduced
};

// layer_norm, rms_norm or one's backward: the node's operands and results, in its slots.
struct NormStep {
  ir::NormKind kind{};
  bool backward = false;
  bool wide = false;  // some dtype does not fit a float
  double eps = 0;
  Dims kept;   // the axes that count slices
  Dims slice;  // the axes that are normalised together; at least one
  // Strides per axis of `kept`, then of `slice`; 0 where a tensor broadcasts.
  std::vector<std::optional<Location>> inputs;
  std::vector<std::optional<Location>> outputs;
};

// Attention, its backward, or an append to a cache: the node's operands and results, in its slots.
struct AttentionStep {
  std::int32_t node = 0;
  struct Slot {
    bool present = false;
    Location at;
  };
  std::vector<Slot> inputs;
  std::vector<Slot> outputs;
};

using Step = std::variant<PointwiseStep, MatmulStep, ReduceStep, NormStep, AttentionStep>;

struct Program {
  ir::Graph graph;
  const Kernels* kernels = nullptr;
  std::vector<Step> steps;

  // Roots below graph.tensors.size() are that tensor's; the others are ours.
  struct Memory {
    std::int64_t bytes = 0;  // of workspace; 0 for inputs and outputs, which the caller binds
    std::int64_t offset = 0;
    int first_step = -1;
    int last_step = -1;
  };
  std::vector<Memory> memory;
  std::vector<Root> step_memory;  // per step: its own workspace, or -1
  std::int64_t workspace_bytes = 0;
};

// The program of a graph for given kernels. Every graph has one.
Program make_program(const ir::Graph& graph, const Kernels& kernels);

// The host's memory that it takes, its graph included.
std::size_t host_bytes(const Program& program);

// Runs it. `roots` has the caller's addresses of inputs and outputs; `workspace` is aligned.
Status run_program(const Program& program, std::vector<std::byte*> roots, std::byte* workspace);

// ---- the steps' own files ----------------------------------------------------------------------

// Bytes of workspace that a step needs for itself while it runs.
std::size_t matmul_workspace(const Kernels& kernels, const MatmulStep& step);
std::size_t norm_workspace(const NormStep& step);
std::size_t attention_workspace(const Kernels& kernels, const ir::Graph& graph,
                                const AttentionStep& step);

Status run_matmul(const Kernels& kernels, const MatmulStep& step,
                  const std::vector<std::byte*>& roots, std::byte* workspace);
Status run_reduce(const Kernels& kernels, const ReduceStep& step,
                  const std::vector<std::byte*>& roots);
Status run_norm(const Kernels& kernels, const NormStep& step, const std::vector<std::byte*>& roots,
                std::byte* workspace);
Status run_attention(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                     const std::vector<std::byte*>& roots, std::byte* workspace);
Status run_cache_append(const ir::Graph& graph, const AttentionStep& step,
                        const std::vector<std::byte*>& roots);

}  // namespace lawson::cpu
