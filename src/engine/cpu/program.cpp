#include "engine/cpu/program.h"

#include <algorithm>

#include "engine/cpu/planner.h"
#include "engine/cpu/pool.h"
#include "engine/engine.h"

namespace lawson::cpu {
namespace {

void visit_memory(const Expression& expression, const auto& visit) {
  for (const Value& value : expression.values) {
    const auto* location = std::get_if<Location>(&value.from);
    if (location != nullptr && location->kind == Location::Kind::memory) visit(location->root);
  }
  for (const Sink& sink : expression.sinks) visit(sink.to.root);
}

void visit_memory(const Step& step, const auto& visit) {
  std::visit(ir::Overloaded{
                 [&](const PointwiseStep& s) { visit_memory(s.expression, visit); },
                 [&](const MatmulStep& s) {
                   visit_memory(s.a, visit);
                   visit_memory(s.b, visit);
                   visit_memory(s.epilogue, visit);
                   for (const auto* scales : {&s.a_scales, &s.b_scales}) {
                     if (*scales) visit((*scales)->at.root);
                   }
                 },
                 [&](const ReduceStep& s) {
                   visit_memory(s.operand, visit);
                   visit(s.to.root);
                 },
                 [&](const NormStep& s) {
                   for (const auto* slots : {&s.inputs, &s.outputs}) {
                     for (const auto& slot : *slots) {
                       if (slot) visit(slot->root);
                     }
                   }
                 },
                 [&](const AttentionStep& s) {
                   for (const auto& slot : s.inputs) {
                     if (slot.present) visit(slot.at.root);
                   }
                   for (const auto& slot : s.outputs) {
                     if (slot.present) visit(slot.at.root);
                   }
                 },
             },
             step);
}

std::size_t own_workspace(const Program& program, const Step& step) {
  return std::visit(ir::Overloaded{
                        [&](const MatmulStep& s) { return matmul_workspace(*program.kernels, s); },
                        [&](const NormStep& s) { return norm_workspace(s); },
                        [&](const AttentionStep& s) {
                          return attention_workspace(*program.kernels, program.graph, s);
                        },
                        [](const PointwiseStep&) { return std::size_t{0}; },
                        [](const ReduceStep&) { return std::size_t{0}; },
                    },
                    step);
}

// Gives steps their own workspace and says how long each piece of memory is needed.
void find_lifetimes(Program& program) {
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const std::size_t bytes = own_workspace(program, program.steps[i]);
    const Root own = bytes == 0 ? -1 : static_cast<Root>(program.memory.size());
    program.step_memory.push_back(own);
    const auto touch = [&](Root root) {
      Program::Memory& memory = program.memory[static_cast<std::size_t>(root)];
      if (memory.first_step < 0) memory.first_step = static_cast<int>(i);
      memory.last_step = static_cast<int>(i);
    };
    visit_memory(program.steps[i], touch);
    if (own < 0) continue;
    program.memory.emplace_back();
    program.memory.back().bytes = static_cast<std::int64_t>(bytes);
    touch(own);
  }
}

// First fit among the pieces that are alive at the same time.
void assign_offsets(Program& program) {
  std::vector<Program::Memory*> placed;
  std::int64_t total = 0;
  for (Program::Memory& memory : program.memory) {
    if (memory.bytes == 0 || memory.first_step < 0) continue;
    const auto size = static_cast<std::int64_t>(align_up(static_cast<std::size_t>(memory.bytes)));
    std::int64_t offset = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (const Program::Memory* other : placed) {
        const auto other_end =
            other->offset +
            static_cast<std::int64_t>(align_up(static_cast<std::size_t>(other->bytes)));
        const bool alive =
            other->first_step <= memory.last_step && memory.first_step <= other->last_step;
        if (alive && offset < other_end && other->offset < offset + size) {
          offset = other_end;
          moved = true;
        }
      }
    }
    memory.offset = offset;
    placed.push_back(&memory);
    total = std::max(total, offset + size);
  }
  program.workspace_bytes = total;
}

}  // namespace

Program make_program(const ir::Graph& graph, const Kernels& kernels) {
  Program program = Planner{graph, kernels}.plan();
  find_lifetimes(program);
  assign_offsets(program);
  return program;
}

std::size_t host_bytes(const Program& program) {
  const auto of = [](const Expression& expression) {
    const std::size_t strides = sizeof(std::int64_t) * expression.shape.size();
    return strides + (sizeof(Value) + strides) * expression.values.capacity() +
           (sizeof(Sink) + strides) * expression.sinks.capacity();
  };
  std::size_t bytes = sizeof(program) + lawson::host_bytes(program.graph) +
                      sizeof(Step) * program.steps.capacity() +
                      sizeof(Program::Memory) * program.memory.capacity() +
                      sizeof(Root) * program.step_memory.capacity();
  for (const Step& step : program.steps) {
    bytes += std::visit(
        ir::Overloaded{
            [&](const PointwiseStep& s) { return of(s.expression); },
            [&](const MatmulStep& s) { return of(s.a) + of(s.b) + of(s.epilogue); },
            [&](const ReduceStep& s) { return of(s.operand) + s.reduced.capacity() / 8; },
            [](const NormStep& s) {
              return sizeof(std::optional<Location>) * (s.inputs.capacity() + s.outputs.capacity());
            },
            [](const AttentionStep& s) {
              return sizeof(AttentionStep::Slot) * (s.inputs.capacity() + s.outputs.capacity());
            },
        },
        step);
  }
  return bytes;
}

Status run_program(const Program& program, std::vector<std::byte*> roots, std::byte* workspace) {
  roots.resize(program.memory.size(), nullptr);
  for (std::size_t i = 0; i < program.memory.size(); ++i) {
    if (program.memory[i].bytes > 0) roots[i] = workspace + program.memory[i].offset;
  }
  const Kernels& kernels = *program.kernels;
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const Root own = program.step_memory[i];
    std::byte* step_workspace = own < 0 ? nullptr : roots[static_cast<std::size_t>(own)];
    LAWSON_CHECK(std::visit(
        ir::Overloaded{
            [&](const PointwiseStep& s) { return run_expression(kernels, s.expression, roots); },
            [&](const MatmulStep& s) { return run_matmul(kernels, s, roots, step_workspace); },
            [&](const ReduceStep& s) { return run_reduce(kernels, s, roots); },
            [&](const NormStep& s) { return run_norm(kernels, s, roots, step_workspace); },
            [&](const AttentionStep& s) {
              return run_attention(kernels, program.graph, s, roots, step_workspace);
            },
        },
        program.steps[i]));
  }
  return {};
}

}  // namespace lawson::cpu
