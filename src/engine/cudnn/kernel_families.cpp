#include "engine/cudnn/kernel_families.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/lazy.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/recent.h"

namespace lawson::cudnn {
namespace {

constexpr std::size_t kCapacity = 64;  // a kernel has some 100 KB
// Vectors of so many elements may be what a kernel reads at once.
constexpr std::int64_t kVector = 8;

// Dims from the innermost outwards.
std::vector<std::size_t> memory_order(const Dims& strides) {
  std::vector<std::size_t> order(strides.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  return order;
}

// The sizes of the inner dims and the columns of products. cuDNN 9.19 gives them a kernel that was
// compiled for others, and one in 39 such launches fails ("invalid value", measured on an H200).
std::vector<std::int64_t> fixed_sizes(const ir::Graph& fusion) {
  std::vector<std::int64_t> sizes;
  for (const ir::Node& node : fusion.nodes) {
    if (!std::holds_alternative<ir::Matmul>(node.op) &&
        !std::holds_alternative<ir::ScaledMatmul>(node.op)) {
      continue;
    }
    sizes.push_back(fusion.tensor(node.inputs.front()).shape.back());
    sizes.push_back(fusion.tensor(node.outputs.front()).shape.back());
  }
  return sizes;
}

}  // namespace

std::string family_text(const ir::Graph& fusion) {
  const std::vector<std::int64_t> fixed = fixed_sizes(fusion);
  ir::Graph family = fusion;
  for (ir::Tensor& tensor : family.tensors) {
    const std::vector<std::size_t> order = memory_order(tensor.strides);
    for (std::size_t i = 0; i < order.size(); ++i) {
      tensor.strides[order[i]] = static_cast<std::int64_t>(i);
    }
    for (std::int64_t& dim : tensor.shape) {
      const bool is_fixed = dim == 1 || std::find(fixed.begin(), fixed.end(), dim) != fixed.end();
      if (!is_fixed) dim = -std::gcd(dim, kVector);
    }
  }
  return ir::canonical_text(family);
}

std::shared_ptr<KernelFamily> kernel_family(const ir::Graph& fusion, const Device& device) {
  if (!has_matmul(fusion)) return nullptr;
  static Lazy<Recent<KernelFamily>> families;
  const std::string id = fmt::format("{} {} {}\n{}", device.ordinal, device.name,
                                     device.properties.dump(), family_text(fusion));
  return families.get([] { return Recent<KernelFamily>{kCapacity}; })
      .find_or(id, make_kernel_family);
}

}  // namespace lawson::cudnn
