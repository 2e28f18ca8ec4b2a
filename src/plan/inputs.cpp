#include "plan/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "ir/attention.h"
#include "plan/input_sequences.h"
#include "plan/input_stream.h"
#include "plan/tasks.h"

namespace lawson::plan {
namespace {

constexpr std::size_t kGuard = 256;
constexpr std::byte kGuardByte{0xC3};

std::byte poison_of(DType dtype) {
  // All ones is a NaN in every float format that has one.
  const bool has_nan = is_float(dtype) && dtype != DType::f4e2m1;
  return has_nan ? std::byte{0xFF} : std::byte{0xA5};
}

constexpr std::array<std::pair<InputStyle, std::string_view>, 7> kStyles{
    {{InputStyle::normal, "normal"},
     {InputStyle::large_logits, "large_logits"},
     {InputStyle::one_hot, "one_hot"},
     {InputStyle::denormal, "denormal"},
     {InputStyle::masked_rows, "masked_rows"},
     {InputStyle::low_mask, "low_mask"},
     {InputStyle::poisoned, "poisoned"}}};

// What a row of a ragged batch holds that no sequence has: should be read by nobody, and shows.
constexpr double kStray = 1000;

// What a tensor is to an attention node, for the styles.
enum class Role { other, query, key, mask };

struct AttentionUse {
  Role role = Role::other;
  double scale = 1;
};

// Operands of attention that are inputs, with the scale that the product of Q and K gets.
std::map<ir::TensorId, AttentionUse> attention_uses(const ir::Graph& graph) {
  using Slot = ir::AttentionSlots;
  std::map<ir::TensorId, AttentionUse> uses;
  for (const ir::Node& node : graph.nodes) {
    if (ir::attention_rule(node.op) == nullptr) continue;
    double factor = 1;
    if (node.inputs[Slot::scale] != ir::kNone) {
      const auto& values = graph.tensor(node.inputs[Slot::scale]).values;
      if (!values.empty()) factor = values[0];
    }
    uses[node.inputs[Slot::q]] = {Role::query, factor};
    uses[node.inputs[Slot::k]] = {Role::key, factor};
    uses[node.inputs[Slot::mask]] = {Role::mask, 1};
  }
  for (const ir::Node& node : graph.nodes) {
    if (!std::holds_alternative<ir::CacheAppend>(node.op)) continue;
    const auto use = uses.find(node.outputs[0]);
    if (use == uses.end()) continue;
    const AttentionUse same = use->second;
    uses[node.inputs[ir::CacheAppend::cache]] = uses[node.inputs[ir::CacheAppend::fresh]] = same;
  }
  return uses;
}

// Does masked_rows hide the score at this index of a mask?
bool hides(const InputStream& stream, const Dims& index, std::uint64_t position) {
  return (index[0] + index[1] + index[2]) % 3 == 2 || stream.integer(position, 0, 9) < 3;
}

double float_value(const ir::Tensor& tensor, const InputStream& stream, InputStyle style,
                   const AttentionUse& use, const Dims& index, std::uint64_t position) {
  const double n = stream.normal(position);
  if (tensor.dtype == DType::f8e8m0) return std::exp2(static_cast<double>(position * 7 % 5) - 2);
  const std::int64_t width = tensor.shape.empty() ? 1 : tensor.shape.back();
  const double scale = std::max(std::fabs(use.scale), 1e-6);
  switch (style) {
    case InputStyle::normal:
      return n;
    case InputStyle::large_logits: {
      if (use.role != Role::query && use.role != Role::key) return n;
      // q = +-g w + noise, k = g w + noise with w of alternating signs: q.k scale = +-200.
      const double g = std::sqrt(200 / (static_cast<double>(width) * scale));
      const double sign = index.back() % 2 == 0 ? 1 : -1;
      const bool negative = use.role == Role::query && index[index.size() - 2] % 2 == 1;
      return (negative ? -sign : sign) * g + 0.25 * n;
    }
    case InputStyle::one_hot: {
      if (tensor.shape.size() < 2) return n;
      const std::uint64_t row = position / static_cast<std::uint64_t>(width);
      if (use.role != Role::query && use.role != Role::key) {
        return stream.integer(row, 0, width - 1) == index.back() ? 1 + std::fabs(n) : 0;
      }
      // Row i of q meets rows i, i + d, ... of k.
      return index[index.size() - 2] % width == index.back() ? std::sqrt(60 / scale) : 0;
    }
    case InputStyle::denormal:
      return n * 16 * smallest_subnormal(tensor.dtype);
    case InputStyle::masked_rows:
      if (use.role != Role::mask || !hides(stream, index, position)) return n;
      return -std::numeric_limits<double>::infinity();
    case InputStyle::low_mask: {
      if (use.role != Role::mask) return n;
      constexpr std::array<double, 4> kShifts{-200, -95, -80, 0};
      return kShifts[static_cast<std::size_t>((index[0] + index[1] + index[2]) % 4)] + n;
    }
    case InputStyle::poisoned:
      return n;
  }
  return n;
}

double element_value(const ir::Tensor& tensor, const InputStream& stream, InputStyle style,
                     const AttentionUse& use, const Dims& index, std::uint64_t position) {
  if (!tensor.values.empty()) return tensor.values[static_cast<std::size_t>(position)];
  if (tensor.by_value) return 1;
  if (tensor.dtype == DType::boolean) {
    if (style == InputStyle::masked_rows && use.role == Role::mask) {
      return hides(stream, index, position) ? 0 : 1;
    }
    return static_cast<double>(stream.integer(position, 0, 1));
  }
  if (is_float(tensor.dtype)) return float_value(tensor, stream, style, use, index, position);
  std::pair<std::int64_t, std::int64_t> domain{-8, 7};
  if (tensor.dtype == DType::u8) domain = {0, 15};
  if (tensor.domain) domain = *tensor.domain;
  return static_cast<double>(stream.integer(position, domain.first, domain.second));
}

// Element `position` of the logical order, and those behind it up to `end`.
void fill_part(const Buffer& buffer, const ir::Tensor& tensor, const InputStream& stream,
               InputStyle style, const AttentionUse& use, const TokenRows* tokens,
               std::uint64_t position, std::uint64_t end) {
  Dims index(tensor.shape.size(), 0);
  std::uint64_t rest = position;
  for (std::size_t dim = index.size(); dim-- > 0;) {
    const auto size = static_cast<std::uint64_t>(tensor.shape[dim]);
    index[dim] = static_cast<std::int64_t>(rest % size);
    rest /= size;
  }
  for (; position < end; ++position, next_index(index, tensor.shape)) {
    const std::int64_t offset = offset_of(index, tensor.strides);
    if (tokens != nullptr && !tokens->holds(index[0], index[2])) {
      if (style == InputStyle::poisoned) continue;
      if (tokens->bucket) {
        store_element(buffer.data(), tensor.dtype, offset, kStray);
        continue;
      }
    }
    store_element(buffer.data(), tensor.dtype, offset,
                  element_value(tensor, stream, style, use, index, position));
  }
}

// Do elements share memory: halves of a byte, or strides that lead to one place twice?
bool shares_memory(const ir::Tensor& tensor) {
  if (bit_width(tensor.dtype) < 8) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] > 1) dims.emplace_back(tensor.strides[i], tensor.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return true;
    extent = stride * (size - 1) + extent;
  }
  return false;
}

void fill(const Buffer& buffer, const ir::Tensor& tensor, const InputStream& stream,
          InputStyle style, const AttentionUse& use, const TokenRows* tokens) {
  const auto count = static_cast<std::uint64_t>(element_count(tensor.shape).value_or(0));
  if (count == 0) return;
  if (!tensor.values.empty()) tokens = nullptr;
  // Values depend on the position only; where elements share memory, the last one has to stay.
  constexpr std::uint64_t kPart = std::uint64_t{1} << 16;
  const std::uint64_t part = shares_memory(tensor) ? count : kPart;
  run_tasks(static_cast<std::size_t>((count + part - 1) / part), core_count(), [&](std::size_t i) {
    const std::uint64_t begin = part * i;
    fill_part(buffer, tensor, stream, style, use, tokens, begin, std::min(begin + part, count));
  });
}

void copy_elements(const ir::Tensor& to, void* to_data, const ir::Tensor& from,
                   const void* from_data) {
  if (element_count(to.shape).value_or(0) == 0) return;
  Dims index(to.shape.size(), 0);
  do {
    store_element(to_data, to.dtype, offset_of(index, to.strides),
                  load_element(from_data, from.dtype, offset_of(index, from.strides)));
  } while (next_index(index, to.shape));
}

Status execute_on(Engine& engine, const ir::Graph& graph, std::span<const Binding> bindings) {
  const Device device = cpu_device();
  LAWSON_TRY(Plan plan, engine.compile(graph, device, {}, std::nullopt, {}));
  LAWSON_TRY(auto loaded, engine.load(plan, device));
  constexpr std::size_t kAlignment = 64;
  std::vector<std::byte> memory(static_cast<std::size_t>(plan.workspace_bytes) + kAlignment);
  void* workspace = memory.data();
  std::size_t space = memory.size();
  std::align(kAlignment, static_cast<std::size_t>(plan.workspace_bytes), workspace, space);
  return engine.execute(*loaded, bindings, workspace, nullptr);
}

// Fills the o and stats inputs of one backward node with what its forward returns.
Status fill_forward_results(const ir::Graph& graph, const ir::Node& node, Engine& reference,
                            std::vector<Buffer>& buffers) {
  using Back = ir::AttentionBackward;
  using Forward = ir::Attention;
  const auto& backward = std::get<Back>(node.op);
  const ir::TensorId o = node.inputs[Back::o];
  const ir::TensorId stats = node.inputs[Back::stats];
  if (!graph.is_input(o) && !graph.is_input(stats)) return {};

  ir::Builder builder(graph.name + ".forward");
  std::map<ir::TensorId, ir::TensorId> added;
  std::vector<Binding> bindings;
  std::vector<ir::TensorId> operands(Forward::kInputs, ir::kNone);
  for (std::size_t slot = 0; slot < Forward::kShared; ++slot) {
    const ir::TensorId id = node.inputs[slot];
    if (id == ir::kNone) continue;
    if (!graph.is_input(id)) {
      return invalid(
          "graph '{}': operand '{}' of attention_backward is computed, so its forward's "
          "results cannot be generated; give o and stats",
          graph.name, graph.tensor(id).name);
    }
    if (!added.contains(id)) {
      LAWSON_TRY(added[id], builder.input(graph.tensor(id)));
      bindings.push_back({ir::Graph::uid(added[id]), buffers[static_cast<std::size_t>(id)].data()});
    }
    operands[slot] = added[id];
  }
  LAWSON_TRY(auto results, builder.add(Forward{backward.rule}, operands,
                                       {{"forward.o", graph.tensor(o).dtype, true},
                                        {"forward.stats", std::nullopt, true}}));
  for (const auto slot : {Forward::o, Forward::stats}) LAWSON_CHECK(builder.output(results[slot]));
  LAWSON_TRY(ir::Graph forward, std::move(builder).finish());
  const std::vector<Buffer> outputs = make_outputs(forward);
  for (const Buffer& buffer : outputs) bindings.push_back(buffer.binding());
  LAWSON_CHECK(execute_on(reference, forward, bindings));
  for (const auto& [id, buffer] : {std::pair{o, &outputs[0]}, {stats, &outputs[1]}}) {
    if (!graph.is_input(id)) continue;
    copy_elements(graph.tensor(id), buffers[static_cast<std::size_t>(id)].data(),
                  forward.tensor(buffer->id()), buffer->data());
  }
  return {};
}

}  // namespace

Buffer::Buffer(const ir::Tensor& tensor, ir::TensorId id)
    : id_{id}, poison_{poison_of(tensor.dtype)} {
  bytes_ = byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0));
  const auto alignment = static_cast<std::size_t>(tensor.alignment);
  capacity_ = bytes_ + 2 * kGuard + 4 * alignment;
  memory_ = std::make_unique<std::byte[]>(capacity_);
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get()) + kGuard;
  // An odd multiple of the alignment.
  const std::uintptr_t aligned = (address / alignment + 1) * alignment;
  offset_ = aligned - reinterpret_cast<std::uintptr_t>(memory_.get());
  if ((aligned / alignment) % 2 == 0) offset_ += alignment;
  std::fill_n(memory_.get(), capacity_, kGuardByte);
  std::fill_n(data(), bytes_, poison_);
}

bool Buffer::guards_intact() const {
  const auto intact = [](std::byte b) { return b == kGuardByte; };
  return std::all_of(memory_.get(), data(), intact) &&
         std::all_of(data() + bytes_, memory_.get() + capacity_, intact);
}

std::string_view to_string(InputStyle style) {
  return kStyles[static_cast<std::size_t>(style)].second;
}

std::optional<InputStyle> input_style_from_string(std::string_view word) {
  for (const auto& [style, name] : kStyles) {
    if (name == word) return style;
  }
  return std::nullopt;
}

Result<std::vector<Buffer>> make_inputs(const ir::Graph& graph, std::uint64_t seed,
                                        Engine& reference, InputStyle style) {
  const auto uses = attention_uses(graph);
  std::vector<Buffer> buffers;
  for (ir::TensorId id = 0; id < graph.input_count; ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    const auto count = static_cast<std::size_t>(element_count(tensor.shape).value_or(0));
    if (!tensor.values.empty() && tensor.values.size() != count) {
      return invalid("input '{}' has {} values for {} elements", tensor.name, tensor.values.size(),
                     count);
    }
    buffers.emplace_back(tensor, id);
  }
  const auto fill_all = [&](bool floats, const std::map<ir::TensorId, TokenRows>& rows) {
    for (ir::TensorId id = 0; id < graph.input_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (is_float(tensor.dtype) != floats) continue;
      const auto use = uses.find(id);
      const auto tokens = rows.find(id);
      fill(buffers[static_cast<std::size_t>(id)], tensor, InputStream(seed, tensor.name), style,
           use == uses.end() ? AttentionUse{} : use->second,
           tokens == rows.end() ? nullptr : &tokens->second);
    }
  };
  // Lengths first: they say which rows of the others there are.
  fill_all(false, {});
  for (const ir::Node& node : graph.nodes) {
    if (ir::attention_rule(node.op) != nullptr) fill_lengths(graph, node, seed, buffers);
  }
  fill_all(true, token_rows(graph, buffers));
  for (const ir::Node& node : graph.nodes) {
    if (std::holds_alternative<ir::AttentionBackward>(node.op)) {
      LAWSON_CHECK(fill_forward_results(graph, node, reference, buffers));
    }
  }
  return buffers;
}

std::vector<Buffer> make_outputs(const ir::Graph& graph) {
  std::vector<Buffer> buffers;
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const ir::TensorId id = graph.input_count + i;
    buffers.emplace_back(graph.tensor(id), id);
  }
  return buffers;
}

std::vector<Binding> bindings_of(std::span<const Buffer> inputs, std::span<const Buffer> outputs) {
  std::vector<Binding> bindings;
  for (const Buffer& buffer : inputs) bindings.push_back(buffer.binding());
  for (const Buffer& buffer : outputs) bindings.push_back(buffer.binding());
  return bindings;
}

}  // namespace lawson::plan
