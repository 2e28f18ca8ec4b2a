// An execution of the CPU engine against the reference engine's oracle.
#pragma once

#include "engine/reference/reference.h"
#include "helpers.h"

namespace lawson::cpu {

// Strides of `shape` in a random order of its axes, now and then with gaps.
inline Dims random_strides(std::mt19937_64& random, const Dims& shape) {
  std::vector<std::size_t> order(shape.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
  Dims strides(shape.size());
  std::int64_t step = random() % 4 == 0 ? 2 : 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<std::int64_t>(shape[order[i]], 1);
    if (random() % 4 == 0) step += 3;
  }
  return strides;
}

// Runs, and compares every element of every output: within the oracle's bound of its value, NaN
// where that is NaN. Returns the share of elements that the oracle judges.
inline double expect_oracle(Execution& e, const std::string& what) {
  e.run();
  const std::shared_ptr<Engine> reference = make_reference_engine();
  std::vector<Binding> inputs = e.bindings();
  inputs.resize(static_cast<std::size_t>(e.graph().input_count));
  const auto expected =
      expect_value(reference->oracle(e.graph(), inputs, e.engine().arithmetic(e.graph())));
  std::size_t judged = 0;
  std::size_t all = 0;
  for (const OracleOutput& output : expected) {
    const ir::Tensor& tensor = e.graph().tensor(output.id);
    Dims index(tensor.shape.size(), 0);
    int wrong = 0;
    for (std::size_t i = 0; i < output.values.size(); ++i) {
      const double actual = e.at(output.id, offset_of(index, tensor.strides));
      const double value = output.values[i];
      const double bound = output.bounds[i];
      next_index(index, tensor.shape);
      ++all;
      if (std::isinf(bound)) continue;
      ++judged;
      const bool same = actual == value || (std::isnan(actual) && std::isnan(value));
      if (same || std::fabs(actual - value) <= bound) continue;
      if (++wrong > 3) continue;
      ADD_FAILURE() << what << ": " << tensor.name << " element " << i << " is " << actual
                    << ", not " << value << " +- " << bound << '\n'
                    << ir::print(e.graph());
    }
  }
  return all == 0 ? 1 : static_cast<double>(judged) / static_cast<double>(all);
}

}  // namespace lawson::cpu
