#include "engine/reference/scaled_matmul.h"

#include <algorithm>
#include <cmath>

#include "engine/reference/matmul.h"

namespace lawson::reference {
namespace {

using Slot = ir::ScaledMatmul;

// Where the scale of (row, block) is in the logical order of its tensor's last two dims. `blocks`
// is the dim of the blocks, the other one is that of the rows.
class ScalePositions {
 public:
  ScalePositions(const ir::Tensor& scales, bool swizzled, std::size_t blocks)
      : swizzled_{swizzled},
        transposed_{blocks + 2 == scales.shape.size()},
        rows_{static_cast<std::size_t>(scales.shape[scales.shape.size() - 2])},
        columns_{static_cast<std::size_t>(scales.shape.back())},
        by_columns_{scales.strides.back() != 1 && scales.strides[scales.strides.size() - 2] == 1},
        tiles_across_{static_cast<std::size_t>(scales.shape[blocks]) / 4} {}

  std::size_t operator()(std::size_t row, std::size_t block) const {
    if (!swizzled_) return transposed_ ? block * columns_ + row : row * columns_ + block;
    const std::size_t tile = row / 128 * tiles_across_ + block / 4;
    const std::size_t in_memory = tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
    return by_columns_ ? in_memory % rows_ * columns_ + in_memory / rows_ : in_memory;
  }

 private:
  bool swizzled_;
  bool transposed_;  // [blocks, rows]
  std::size_t rows_;
  std::size_t columns_;
  bool by_columns_;  // of the memory
  std::size_t tiles_across_;
};

// One operand with its scales applied, as float64.
struct Dequantised {
  Array product;
  double largest_value = 0;
  double largest_scale = 0;
};

// `of_b`: [.., K, N] with scales [.., B, N]; else [.., M, K] with [.., M, B].
Dequantised dequantise(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                       bool of_b) {
  const auto& op = std::get<ir::ScaledMatmul>(node.op);
  const Array& x = *operands[of_b ? Slot::b : Slot::a];
  const Array& scales = *operands[of_b ? Slot::b_scale : Slot::a_scale];
  const ir::Tensor& tensor = graph.tensor(node.inputs[of_b ? Slot::b_scale : Slot::a_scale]);
  const std::size_t rank = x.shape.size();
  const ScalePositions scale_at(tensor, op.swizzled, of_b ? rank - 2 : rank - 1);
  const auto columns = static_cast<std::size_t>(x.shape.back());
  const auto matrix = static_cast<std::size_t>(x.shape[rank - 2]) * columns;
  const auto scale_matrix =
      static_cast<std::size_t>(scales.shape[rank - 2] * scales.shape[rank - 1]);
  const auto block = static_cast<std::size_t>(op.block);
  const bool exact = x.error.empty() && scales.error.empty();
  Dequantised result{make_array(DType::f64, x.shape)};
  if (!exact) result.product.error.resize(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t within = i % matrix;
    const std::size_t row = within / columns;
    const std::size_t column = within % columns;
    const std::size_t s = i / matrix * scale_matrix +
                          (of_b ? scale_at(column, row / block) : scale_at(row, column / block));
    const double v = x.value[i];
    const double scale = scales.value[s];
    result.product.value[i] = v * scale;
    result.largest_value = std::max(result.largest_value, std::fabs(v));
    result.largest_scale = std::max(result.largest_scale, std::fabs(scale));
    if (exact) continue;
    const double e = x.error_at(i);
    const double scale_error = scales.error_at(s);
    if (e > 0 || scale_error > 0) {
      result.product.error[i] = std::fabs(v) * scale_error + std::fabs(scale) * e + e * scale_error;
    }
  }
  return result;
}

// Engines scale the elements in f32 before they multiply, or sums of a block afterwards: what they
// may flush on the way.
void flush_elements(Array& product, double floor) {
  for (std::size_t i = 0; i < product.size(); ++i) {
    const double v = std::fabs(product.value[i]);
    if (v == 0 || v >= floor) continue;
    if (product.error.empty()) product.error.resize(product.size());
    product.error[i] = std::max(product.error[i], v);
  }
}

}  // namespace

void scaled_matmul(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                   Array& c) {
  matmul(dequantise(graph, node, operands, false).product,
         dequantise(graph, node, operands, true).product, c);
}

void add_scaled_matmul_errors(const ir::Graph& graph, const ir::Node& node,
                              const Operands& operands, Array& c, const Arithmetic& arithmetic) {
  Dequantised a = dequantise(graph, node, operands, false);
  Dequantised b = dequantise(graph, node, operands, true);
  flush_elements(a.product, flush_floor(arithmetic));
  flush_elements(b.product, flush_floor(arithmetic));
  const auto k = static_cast<std::size_t>(a.product.shape.back());
  const double values = std::max(a.largest_value, 1.0) * std::max(b.largest_value, 1.0);
  // Two scalings, or one of both scales and their product: three roundings.
  ProductRounding rounding{2 * arithmetic.operand_roundoff +
                               (accumulation_growth(k) + 3) * arithmetic.accumulate_roundoff,
                           static_cast<double>(k) * flush_floor(arithmetic) * values,
                           accumulator_range(arithmetic)};
  // Products of scales alone, or of an element with a scale of the other side, may overflow where
  // the result does not.
  const double scales = std::max(a.largest_scale, 1.0) * std::max(b.largest_scale, 1.0);
  if (static_cast<double>(std::max<std::size_t>(k, 1)) * scales * values > rounding.range) {
    rounding.range = -1;
  }
  add_product_errors(a.product, b.product, c, rounding);
}

}  // namespace lawson::reference
