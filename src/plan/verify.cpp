#include "plan/verify.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lawson::plan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Is the storage of element `offset` still poison?
bool is_poison(const Buffer& buffer, DType dtype, std::int64_t offset) {
  const int bits = bit_width(dtype);
  if (bits < 8) {
    const auto byte = std::to_integer<unsigned>(buffer.data()[offset / 2]);
    const auto poison = std::to_integer<unsigned>(buffer.poison());
    const unsigned shift = offset % 2 == 0 ? 0 : 4;
    return ((byte >> shift) & 0xFU) == ((poison >> shift) & 0xFU);
  }
  const std::byte* first = buffer.data() + offset * bits / 8;
  return std::all_of(first, first + bits / 8, [&](std::byte b) { return b == buffer.poison(); });
}

// Offsets of the elements of `box`, the part of the tensor that is written, to tell them from the
// gaps. Whole bytes only (4-bit gaps share bytes).
bool gaps_intact(const Buffer& buffer, const ir::Tensor& tensor, const Dims& box) {
  const int bits = bit_width(tensor.dtype);
  if (bits < 8) return true;
  const auto size = static_cast<std::size_t>(bits) / 8;
  std::vector<bool> used(buffer.bytes() / size, false);
  if (element_count(box).value_or(0) > 0) {
    Dims index(box.size(), 0);
    do {
      used[static_cast<std::size_t>(offset_of(index, tensor.strides))] = true;
    } while (next_index(index, box));
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i] && !is_poison(buffer, tensor.dtype, static_cast<std::int64_t>(i))) return false;
  }
  return true;
}

enum class Outcome { right, wrong, wrong_pattern };

Outcome judge(double actual, double expected, double bound, double& error) {
  error = 0;
  if (std::isnan(expected) || std::isnan(actual)) {
    return std::isnan(expected) == std::isnan(actual) ? Outcome::right : Outcome::wrong_pattern;
  }
  if (std::isinf(expected) || std::isinf(actual)) {
    return actual == expected ? Outcome::right : Outcome::wrong_pattern;
  }
  error = std::fabs(actual - expected);
  return error <= bound ? Outcome::right : Outcome::wrong;
}

OutputComparison compare_output(const ir::Tensor& tensor, const Buffer& buffer,
                                const OracleOutput& expected) {
  OutputComparison result;
  result.name = tensor.name;
  result.id = expected.id;
  const Dims& box = expected.there.empty() ? tensor.shape : expected.there;
  result.elements = element_count(box).value_or(0);
  result.guards_intact = buffer.guards_intact();
  result.gaps_intact = gaps_intact(buffer, tensor, box);
  if (result.elements == 0) return result;
  const Dims logical = contiguous_strides(tensor.shape);
  Dims index(box.size(), 0);
  do {
    const auto position = static_cast<std::size_t>(offset_of(index, logical));
    const double value = expected.values[position];
    const double bound = expected.bounds[position];
    if (bound == kInfinity) {
      ++result.unjudged;
      continue;
    }
    const std::int64_t offset = offset_of(index, tensor.strides);
    const double actual = load_element(buffer.data(), tensor.dtype, offset);
    double error = 0;
    const Outcome outcome = judge(actual, value, bound, error);
    result.max_error = std::max(result.max_error, error);
    if (error > 0) {
      result.max_ratio = std::max(result.max_ratio, bound > 0 ? error / bound : kInfinity);
    }
    if (outcome == Outcome::right) continue;
    if (result.wrong++ == 0) {
      result.first_wrong = index;
      result.expected = value;
      result.actual = actual;
      result.bound = bound;
    }
    if (is_poison(buffer, tensor.dtype, offset)) {
      ++result.unwritten;
    } else if (outcome == Outcome::wrong_pattern) {
      ++result.wrong_pattern;
    }
  } while (next_index(index, box));
  return result;
}

std::string describe(const OutputComparison& c) {
  std::string text =
      fmt::format("{}: max error {:.3g}, {:.3g} of its bound", c.name, c.max_error, c.max_ratio);
  if (c.unjudged > 0) text += fmt::format(", {} of {} not judged", c.unjudged, c.elements);
  if (c.wrong > 0) {
    text +=
        fmt::format(", WRONG {} of {}, first at {}: {:.9g}, expected {:.9g} +- {:.3g}", c.wrong,
                    c.elements, lawson::to_string(c.first_wrong), c.actual, c.expected, c.bound);
  }
  if (c.unwritten > 0) text += fmt::format(", {} never written", c.unwritten);
  if (c.wrong_pattern > 0) text += fmt::format(", {} NaN or Inf misplaced", c.wrong_pattern);
  if (!c.guards_intact) text += ", memory outside of the tensor was written";
  if (!c.gaps_intact) text += ", memory between the tensor's elements was written";
  return text;
}

}  // namespace

bool Comparison::ok() const {
  return std::all_of(outputs.begin(), outputs.end(), [](const auto& c) { return c.ok(); });
}

double Comparison::max_ratio() const {
  double ratio = 0;
  for (const OutputComparison& c : outputs) ratio = std::max(ratio, c.max_ratio);
  return ratio;
}

std::string Comparison::text() const {
  std::string text;
  for (const OutputComparison& c : outputs) {
    if (!text.empty()) text += "; ";
    text += describe(c);
  }
  return text;
}

Comparison compare(const ir::Graph& graph, std::span<const Buffer> outputs,
                   std::span<const OracleOutput> expected) {
  Comparison comparison;
  for (const OracleOutput& oracle : expected) {
    const auto buffer = std::find_if(outputs.begin(), outputs.end(),
                                     [&](const Buffer& b) { return b.id() == oracle.id; });
    if (buffer == outputs.end()) {  // nothing of it was returned
      OutputComparison missing;
      missing.name = graph.tensor(oracle.id).name;
      missing.id = oracle.id;
      missing.elements = static_cast<std::int64_t>(oracle.values.size());
      missing.wrong = missing.unwritten = std::max<std::int64_t>(missing.elements, 1);
      comparison.outputs.push_back(std::move(missing));
      continue;
    }
    comparison.outputs.push_back(compare_output(graph.tensor(oracle.id), *buffer, oracle));
  }
  return comparison;
}

}  // namespace lawson::plan
