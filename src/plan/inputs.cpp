#include "plan/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numbers>
#include <numeric>

#include "base/philox.h"
#include "ir/attention.h"

namespace lawson::plan {
namespace {

constexpr std::size_t kGuard = 256;
constexpr std::byte kGuardByte{0xC3};

std::byte poison_of(DType dtype) {
  // All ones is a NaN in every float format that has one.
  const bool has_nan = is_float(dtype) && dtype != DType::f4e2m1;
  return has_nan ? std::byte{0xFF} : std::byte{0xA5};
}

// FNV-1a: a stream per tensor name.
std::uint64_t stream_of(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

class Stream {
 public:
  Stream(std::uint64_t seed, std::string_view name) : seed_{seed}, stream_{stream_of(name)} {}

  std::array<std::uint32_t, 4> bits(std::uint64_t index) const {
    return philox({low(index), high(index), low(stream_), high(stream_)},
                  {low(seed_), high(seed_)});
  }

  // Box-Muller, cut to multiples of 2^-20 so that libm's last bit does not show, then filled up
  // with random low bits so that float types have full significands.
  double normal(std::uint64_t index) const {
    const auto x = bits(index);
    const double u = (static_cast<double>(x[0]) + 0.5) * 0x1p-32;
    const double angle = static_cast<double>(x[1]) * 0x1p-32 * 2 * std::numbers::pi;
    const double n = std::sqrt(-2 * std::log(u)) * std::cos(angle);
    return std::nearbyint(n * 0x1p20) * 0x1p-20 + static_cast<double>(x[2] >> 2) * 0x1p-50;
  }

  std::int64_t integer(std::uint64_t index, std::int64_t low_bound, std::int64_t high_bound) const {
    const auto x = bits(index);
    const std::uint64_t range = static_cast<std::uint64_t>(high_bound - low_bound) + 1;
    const std::uint64_t word = (std::uint64_t{x[0]} << 32) | x[1];
    return low_bound + static_cast<std::int64_t>(range == 0 ? word : word % range);
  }

 private:
  static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }
  std::uint64_t seed_;
  std::uint64_t stream_;
};

// What a tensor is to an attention node, for the styles.
enum class Role { other, query, key };

struct AttentionUse {
  Role role = Role::other;
  double scale = 1;
};

// Q and K operands that are inputs, with the scale that their product gets.
std::map<ir::TensorId, AttentionUse> attention_uses(const ir::Graph& graph) {
  std::map<ir::TensorId, AttentionUse> uses;
  const auto note = [&](const ir::Node& node, std::size_t q, std::size_t k, std::size_t scale) {
    double factor = 1;
    if (node.inputs[scale] != ir::kNone) {
      const auto& values = graph.tensor(node.inputs[scale]).values;
      if (!values.empty()) factor = values[0];
    }
    uses[node.inputs[q]] = {Role::query, factor};
    uses[node.inputs[k]] = {Role::key, factor};
  };
  for (const ir::Node& node : graph.nodes) {
    if (std::holds_alternative<ir::Attention>(node.op)) {
      note(node, ir::Attention::q, ir::Attention::k, ir::Attention::scale);
    } else if (std::holds_alternative<ir::AttentionBackward>(node.op)) {
      note(node, ir::AttentionBackward::q, ir::AttentionBackward::k, ir::AttentionBackward::scale);
    }
  }
  return uses;
}

double float_value(const ir::Tensor& tensor, const Stream& stream, InputStyle style,
                   const AttentionUse& use, const Dims& index, std::uint64_t position) {
  const double n = stream.normal(position);
  if (tensor.dtype == DType::f8e8m0) return std::exp2(static_cast<double>(position * 7 % 5) - 2);
  const std::int64_t width = tensor.shape.empty() ? 1 : tensor.shape.back();
  const double scale = std::max(std::fabs(use.scale), 1e-6);
  switch (style) {
    case InputStyle::normal:
      return n;
    case InputStyle::large_logits: {
      if (use.role == Role::other) return n;
      // q = +-g w + noise, k = g w + noise with w of alternating signs: q.k scale = +-200.
      const double g = std::sqrt(200 / (static_cast<double>(width) * scale));
      const double sign = index.back() % 2 == 0 ? 1 : -1;
      const bool negative = use.role == Role::query && index[index.size() - 2] % 2 == 1;
      return (negative ? -sign : sign) * g + 0.25 * n;
    }
    case InputStyle::one_hot: {
      if (tensor.shape.size() < 2) return n;
      const std::uint64_t row = position / static_cast<std::uint64_t>(width);
      if (use.role == Role::other) {
        return stream.integer(row, 0, width - 1) == index.back() ? 1 + std::fabs(n) : 0;
      }
      // Row i of q meets rows i, i + d, ... of k.
      return index[index.size() - 2] % width == index.back() ? std::sqrt(60 / scale) : 0;
    }
    case InputStyle::denormal:
      return n * 16 * smallest_subnormal(tensor.dtype);
  }
  return n;
}

double element_value(const ir::Tensor& tensor, const Stream& stream, InputStyle style,
                     const AttentionUse& use, const Dims& index, std::uint64_t position) {
  if (!tensor.values.empty()) return tensor.values[static_cast<std::size_t>(position)];
  if (tensor.by_value) return 1;
  if (tensor.dtype == DType::boolean) return static_cast<double>(stream.integer(position, 0, 1));
  if (is_float(tensor.dtype)) return float_value(tensor, stream, style, use, index, position);
  std::pair<std::int64_t, std::int64_t> domain{-8, 7};
  if (tensor.dtype == DType::u8) domain = {0, 15};
  if (tensor.domain) domain = *tensor.domain;
  return static_cast<double>(stream.integer(position, domain.first, domain.second));
}

void fill(const Buffer& buffer, const ir::Tensor& tensor, const Stream& stream, InputStyle style,
          const AttentionUse& use) {
  if (element_count(tensor.shape).value_or(0) == 0) return;
  Dims index(tensor.shape.size(), 0);
  std::uint64_t position = 0;
  do {
    store_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides),
                  element_value(tensor, stream, style, use, index, position));
    ++position;
  } while (next_index(index, tensor.shape));
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
  return engine.execute(*loaded, bindings, nullptr, nullptr);
}

// Cumulative lengths, their padded form and page tables that no values were given for: they have
// to fit the tensors.
class LengthFiller {
 public:
  using Slot = ir::AttentionSlots;
  LengthFiller(const ir::Graph& graph, const ir::Node& node, std::uint64_t seed,
               std::vector<Buffer>& buffers)
      : graph_{graph}, node_{node}, seed_{seed}, buffers_{buffers} {}

  void run() {
    const auto sizes = ir::attention_geometry(graph_, node_);
    sequences_ = sizes->batch;
    if (const ir::Tensor* tensor = input(Slot::sequences); tensor && !tensor->values.empty()) {
      sequences_ =
          std::clamp(static_cast<std::int64_t>(tensor->values[0]), std::int64_t{0}, sizes->batch);
    }
    fill_side(Slot::cu_seqlens_q, Slot::cu_seqlens_q_padded, Slot::q, sizes->rows);
    fill_side(Slot::cu_seqlens_kv, Slot::cu_seqlens_kv_padded, Slot::k, sizes->columns);
    fill_pages(Slot::page_table_k, Slot::k);
    fill_pages(Slot::page_table_v, Slot::v);
  }

 private:
  const ir::Tensor* input(Slot::Shared slot) const {
    const ir::TensorId id = node_.inputs[slot];
    return id != ir::kNone && graph_.is_input(id) ? &graph_.tensor(id) : nullptr;
  }

  void store(Slot::Shared slot, std::int64_t index, std::int64_t value) {
    const ir::Tensor& tensor = *input(slot);
    const auto at = static_cast<std::size_t>(node_.inputs[slot]);
    Dims position = tensor.shape;
    position[2] = tensor.shape[2] == 0 ? 0 : index % tensor.shape[2];
    position[0] = tensor.shape[2] == 0 ? index : index / tensor.shape[2];
    position[1] = position[3] = 0;
    store_element(buffers_[at].data(), tensor.dtype, offset_of(position, tensor.strides),
                  static_cast<double>(value));
  }

  void fill_side(Slot::Shared valid, Slot::Shared padded, Slot::Shared data, std::int64_t longest) {
    const ir::Tensor* lengths = input(valid);
    if (lengths == nullptr || sequences_ == 0) return zero(valid, padded);
    const std::int64_t tokens = graph_.tensor(node_.inputs[data]).shape[2];
    const Stream stream(seed_, lengths->name);
    const Stream gaps(seed_, lengths->name + ".gap");
    std::int64_t end = 0;         // of the valid tokens
    std::int64_t padded_end = 0;  // in memory
    for (std::int64_t n = 0; n <= lengths->shape[0] - 1; ++n) {
      if (lengths->values.empty()) store(valid, n, end);
      const bool gapped = input(padded) != nullptr;
      if (gapped && input(padded)->values.empty()) store(padded, n, padded_end);
      if (n >= sequences_) continue;
      const auto at = static_cast<std::uint64_t>(n);
      // What is left, shared evenly, so that everything fits.
      const std::int64_t share = (tokens - std::max(end, padded_end)) / (sequences_ - n);
      std::int64_t length = stream.integer(at, 0, std::min(longest, share));
      if (!lengths->values.empty()) {
        length = static_cast<std::int64_t>(lengths->values[static_cast<std::size_t>(n) + 1]) -
                 static_cast<std::int64_t>(lengths->values[static_cast<std::size_t>(n)]);
      }
      end += length;
      const std::int64_t room = std::clamp<std::int64_t>(share - length, 0, 16);
      padded_end += length + (gapped ? gaps.integer(at, 0, room) : 0);
    }
  }

  void zero(Slot::Shared valid, Slot::Shared padded) {
    for (const auto slot : {valid, padded}) {
      const ir::Tensor* tensor = input(slot);
      if (tensor == nullptr || !tensor->values.empty()) continue;
      for (std::int64_t n = 0; n < tensor->shape[0]; ++n) store(slot, n, 0);
    }
  }

  // Every entry its own page while there are enough.
  void fill_pages(Slot::Shared slot, Slot::Shared cache) {
    const ir::Tensor* table = input(slot);
    if (table == nullptr || !table->values.empty()) return;
    const std::int64_t pages = graph_.tensor(node_.inputs[cache]).shape[0];
    if (pages == 0) return;
    std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), std::int64_t{0});
    const Stream stream(seed_, table->name);
    for (std::size_t i = order.size() - 1; i > 0; --i) {
      const std::int64_t j = stream.integer(i, 0, static_cast<std::int64_t>(i));
      std::swap(order[i], order[static_cast<std::size_t>(j)]);
    }
    const std::int64_t entries = table->shape[0] * table->shape[2];
    for (std::int64_t e = 0; e < entries; ++e) {
      store(slot, e, order[static_cast<std::size_t>(e % pages)]);
    }
  }

  const ir::Graph& graph_;
  const ir::Node& node_;
  std::uint64_t seed_;
  std::vector<Buffer>& buffers_;
  std::int64_t sequences_ = 0;
};

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
  switch (style) {
    case InputStyle::normal:
      return "normal";
    case InputStyle::large_logits:
      return "large_logits";
    case InputStyle::one_hot:
      return "one_hot";
    case InputStyle::denormal:
      return "denormal";
  }
  return "normal";
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
    const auto use = uses.find(id);
    buffers.emplace_back(tensor, id);
    fill(buffers.back(), tensor, Stream(seed, tensor.name), style,
         use == uses.end() ? AttentionUse{} : use->second);
  }
  for (const ir::Node& node : graph.nodes) {
    if (ir::attention_rule(node.op) != nullptr) LengthFiller(graph, node, seed, buffers).run();
  }
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
