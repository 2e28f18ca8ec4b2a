#include "plan/input_sequences.h"

#include <algorithm>
#include <numeric>

#include "ir/attention.h"
#include "plan/input_stream.h"

namespace lawson::plan {
namespace {

using Slot = ir::AttentionSlots;

class LengthFiller {
 public:
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
    const InputStream stream(seed_, lengths->name);
    const InputStream gaps(seed_, lengths->name + ".gap");
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
    const InputStream stream(seed_, table->name);
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

// The rows that one attention node reads, from the lengths in the buffers.
class RowMarker {
 public:
  RowMarker(const ir::Graph& graph, const ir::Node& node, const std::vector<Buffer>& buffers,
            std::map<ir::TensorId, TokenRows>& rows)
      : graph_{graph},
        node_{node},
        buffers_{buffers},
        sizes_{*ir::attention_geometry(graph, node)},
        result_{rows} {}

  void run() {
    sequences_ = sizes_.batch;
    if (has(Slot::sequences)) {
      sequences_ = std::clamp(integer(Slot::sequences, 0), std::int64_t{0}, sizes_.batch);
    }
    const bool bucket = has(Slot::sequences) || sizes_.ragged_q || sizes_.ragged_kv;
    if (bucket || has(Slot::seqlen_q)) queries();
    for (const auto& [slot, table, page_size] :
         {std::tuple{Slot::k, Slot::page_table_k, sizes_.page_size_k},
          std::tuple{Slot::v, Slot::page_table_v, sizes_.page_size_v}}) {
      if (bucket || has(Slot::seqlen_kv)) keys(slot, table, page_size);
    }
  }

 private:
  bool has(Slot::Shared slot) const {
    return node_.inputs[slot] != ir::kNone && graph_.is_input(node_.inputs[slot]);
  }

  // Element n of an operand whose other dims are 1, or of a page table.
  std::int64_t integer(Slot::Shared slot, std::int64_t n) const {
    const ir::TensorId id = node_.inputs[slot];
    const ir::Tensor& tensor = graph_.tensor(id);
    const Dims at{n / tensor.shape[2], 0, n % tensor.shape[2], 0};
    return static_cast<std::int64_t>(load_element(buffers_[static_cast<std::size_t>(id)].data(),
                                                  tensor.dtype, offset_of(at, tensor.strides)));
  }

  struct Sequence {
    std::int64_t first = 0;
    std::int64_t length = 0;
  };

  Sequence sequence(std::int64_t b, Slot::Shared lengths, Slot::Shared valid, Slot::Shared padded,
                    std::int64_t full) const {
    Sequence s{0, has(lengths) ? integer(lengths, b) : full};
    if (has(valid)) {
      s.first = integer(valid, b);
      s.length = integer(valid, b + 1) - s.first;
    }
    if (has(padded)) s.first = integer(padded, b);
    return s;
  }

  TokenRows& rows_of(ir::TensorId id) {
    TokenRows& rows = result_[id];
    const Dims& shape = graph_.tensor(id).shape;
    rows.rows = shape[2];
    rows.bucket = has(Slot::sequences);
    rows.read.resize(static_cast<std::size_t>(shape[0] * shape[2]), 0);
    return rows;
  }

  static void mark(TokenRows& rows, std::int64_t b, std::int64_t s, char value = 1) {
    const std::int64_t at = b * rows.rows + s;
    if (s >= 0 && s < rows.rows && at < static_cast<std::int64_t>(rows.read.size())) {
      rows.read[static_cast<std::size_t>(at)] = value;
    }
  }

  void queries() {
    std::vector<std::size_t> slots{Slot::q};
    if (std::holds_alternative<ir::AttentionBackward>(node_.op)) {
      using Back = ir::AttentionBackward;
      slots.insert(slots.end(), {Back::o, Back::dout, Back::stats});
    }
    for (const std::size_t slot : slots) {
      const ir::TensorId id = node_.inputs[slot];
      if (!graph_.is_input(id)) continue;
      TokenRows& rows = rows_of(id);
      for (std::int64_t b = 0; b < sequences_; ++b) {
        const Sequence s =
            sequence(b, Slot::seqlen_q, Slot::cu_seqlens_q, Slot::cu_seqlens_q_padded, sizes_.rows);
        for (std::int64_t i = 0; i < s.length; ++i) {
          mark(rows, sizes_.ragged_q ? 0 : b, s.first + i);
        }
      }
    }
  }

  void keys(Slot::Shared slot, Slot::Shared table, std::int64_t page_size) {
    const ir::Node* append = producer(node_.inputs[slot]);
    const ir::TensorId id =
        append != nullptr ? append->inputs[ir::CacheAppend::cache] : node_.inputs[slot];
    if (!graph_.is_input(id)) return;
    const ir::TensorId fresh =
        append != nullptr ? append->inputs[ir::CacheAppend::fresh] : ir::kNone;
    const std::int64_t appended = append != nullptr ? graph_.tensor(fresh).shape[2] : 0;
    TokenRows& rows = rows_of(id);
    for (std::int64_t b = 0; b < sequences_; ++b) {
      const Sequence s = sequence(b, Slot::seqlen_kv, Slot::cu_seqlens_kv,
                                  Slot::cu_seqlens_kv_padded, sizes_.columns);
      for (std::int64_t j = 0; j < s.length - appended; ++j) {
        if (sizes_.paged) {
          const std::int64_t pages = graph_.tensor(node_.inputs[table]).shape[2];
          mark(rows, integer(table, b * pages + j / page_size), j % page_size);
        } else {
          mark(rows, sizes_.ragged_kv ? 0 : b, s.first + j);
        }
      }
      if (append == nullptr || !graph_.is_input(fresh)) continue;
      TokenRows& added = rows_of(fresh);
      for (std::int64_t j = std::max<std::int64_t>(0, appended - s.length); j < appended; ++j) {
        mark(added, b, j);
      }
    }
  }

  const ir::Node* producer(ir::TensorId id) const {
    for (const ir::Node& node : graph_.nodes) {
      if (std::holds_alternative<ir::CacheAppend>(node.op) && node.outputs[0] == id) return &node;
    }
    return nullptr;
  }

  const ir::Graph& graph_;
  const ir::Node& node_;
  const std::vector<Buffer>& buffers_;
  ir::AttentionGeometry sizes_;
  std::map<ir::TensorId, TokenRows>& result_;
  std::int64_t sequences_ = 0;
};

}  // namespace

void fill_lengths(const ir::Graph& graph, const ir::Node& node, std::uint64_t seed,
                  std::vector<Buffer>& buffers) {
  LengthFiller(graph, node, seed, buffers).run();
}

std::map<ir::TensorId, TokenRows> token_rows(const ir::Graph& graph,
                                             const std::vector<Buffer>& buffers) {
  std::map<ir::TensorId, TokenRows> rows;
  for (const ir::Node& node : graph.nodes) {
    if (ir::attention_rule(node.op) != nullptr) RowMarker(graph, node, buffers, rows).run();
  }
  return rows;
}

}  // namespace lawson::plan
