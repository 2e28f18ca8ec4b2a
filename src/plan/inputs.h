// Generated input data and guarded memory for executing a graph: for `run`, `bench`, verification
// and tests. Values depend on (seed, tensor name, logical index) only, not on layout or platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace lawson::plan {

// Host memory of one tensor between two guard zones. Starts out full of poison (NaN for floats):
// gaps that strides leave keep it, so that wrong indexing shows.
class Buffer {
 public:
  Buffer(const ir::Tensor& tensor, ir::TensorId id);

  ir::TensorId id() const { return id_; }
  std::byte* data() const { return memory_.get() + offset_; }
  std::size_t bytes() const { return bytes_; }
  Binding binding() const { return {ir::Graph::uid(id_), data()}; }
  std::byte poison() const { return poison_; }

  bool guards_intact() const;

 private:
  ir::TensorId id_;
  std::byte poison_;
  std::size_t bytes_ = 0;
  std::size_t offset_ = 0;  // data is aligned as the tensor promises, and not more
  std::size_t capacity_ = 0;
  std::unique_ptr<std::byte[]> memory_;
};

enum class InputStyle {
  normal,        // standard normal floats, integers from their domain or [-8, 8)
  large_logits,  // q and k such that rows have a log-sum-exp near +200 or -200
  one_hot,       // q and k such that a row's softmax is (nearly) one-hot; other rank-2+ floats: one
                 // nonzero per row
  denormal,      // floats of the size of their type's subnormal numbers
  masked_rows,   // the mask of an attention hides every third row, and 30% of the others' keys:
                 // false, or -infinity where it is added
  low_mask,      // a mask that is added lowers the rows' log-sum-exp by 200, 95, 80 and 0 in turn
  poisoned,  // NaN in what no sequence of an attention has: behind its length, between it and the
             // next, in pages that it does not fill
};
std::string_view to_string(InputStyle style);
std::optional<InputStyle> input_style_from_string(std::string_view word);

// One buffer per input. Tensors with `values` get those. Rows of a ragged batch that no sequence
// has are 1000 (NaN where poisoned). The o and stats operands of an attention backward are computed
// with the reference engine from the other operands, as a forward would.
Result<std::vector<Buffer>> make_inputs(const ir::Graph& graph, std::uint64_t seed,
                                        Engine& reference, InputStyle style = InputStyle::normal);

// One poisoned buffer per output.
std::vector<Buffer> make_outputs(const ir::Graph& graph);

std::vector<Binding> bindings_of(std::span<const Buffer> inputs, std::span<const Buffer> outputs);

}  // namespace lawson::plan
