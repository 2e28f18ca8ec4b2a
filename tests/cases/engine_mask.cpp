// The dropout mask of an engine whose stream is its own.
#include <algorithm>

#include "cases/expected.h"
#include "cases/judge.h"
#include "front/attention.h"
#include "ir/attention.h"

namespace lawson::cases {
namespace {

// Runs of unit vectors that one mask may cost.
constexpr std::int64_t kMostBlocks = 160;

Result<front::AttentionSpec> forward_of(const Case& item) {
  LAWSON_TRY(auto spec, front::attention_from_json(item.spec, item.name));
  spec.pass = front::Pass::forward;
  spec.return_stats = spec.return_max_logit = spec.return_dropout_mask = false;
  return spec;
}

const plan::Buffer* named(const ir::Graph& graph, const std::vector<plan::Buffer>& buffers,
                          const std::string& name) {
  const auto found = std::find_if(buffers.begin(), buffers.end(), [&](const plan::Buffer& b) {
    return graph.tensor(b.id()).name == name;
  });
  return found == buffers.end() ? nullptr : &*found;
}

template <typename Visit>
void for_each_element(const ir::Graph& graph, const plan::Buffer& buffer, Visit visit) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  if (element_count(tensor.shape).value_or(0) == 0) return;
  Dims index(tensor.shape.size(), 0);
  do {
    visit(tensor, index, offset_of(index, tensor.strides));
  } while (next_index(index, tensor.shape));
}

// With Q = 0 and values that are unit vectors, an output element is one softmax weight: 0 where it
// was dropped. The reference engine without dropout says where it would not be 0.
class WeightReader {
 public:
  WeightReader(Engine& engine, const Device& device, Engine& reference, const Case& item)
      : engine_{engine}, device_{device}, reference_{reference}, item_{item} {}

  Result<std::vector<double>> run(front::AttentionSpec spec) {
    if (spec.paged) return unsupported("test", "weights of paged values are not read");
    LAWSON_TRY(graph_, front::attention_graph(spec, spec.pass));
    spec.dropout = 0;
    LAWSON_TRY(plain_, front::attention_graph(spec, spec.pass));
    const auto node = std::find_if(graph_.nodes.begin(), graph_.nodes.end(), [](const auto& n) {
      return ir::attention_rule(n.op) != nullptr;
    });
    sizes_ = *ir::attention_geometry(graph_, *node);
    sequences_ = std::min(spec.batch, sizes_.batch);
    LAWSON_TRY(plan_, compiled(engine_, device_, graph_, {}));
    LAWSON_TRY(plain_plan_, reference_.compile(plain_, cpu_device(), {}, std::nullopt, {}));
    LAWSON_TRY(inputs_, plan::make_inputs(graph_, item_.seed, reference_, item_.style));
    LAWSON_TRY(plain_inputs_, plan::make_inputs(plain_, item_.seed, reference_, item_.style));
    clear("q");
    mask_.assign(static_cast<std::size_t>(element_count(sizes_.scores()).value_or(0)), 2);
    const std::int64_t tokens = last_token();
    const std::int64_t blocks = (tokens + sizes_.value_depth - 1) / sizes_.value_depth;
    if (blocks > kMostBlocks) {
      return unsupported("test", "too many keys to read their weights one by one");
    }
    for (std::int64_t block = 0; block < blocks; ++block) LAWSON_CHECK(read(block));
    return mask_;
  }

 private:
  struct Tokens {
    std::int64_t entry = 0;  // along b of the tensor
    std::int64_t first = 0;
    std::int64_t length = 0;
  };

  std::int64_t integer(const std::string& name, std::int64_t at) const {
    const plan::Buffer& buffer = *named(graph_, inputs_, name);
    const ir::Tensor& tensor = graph_.tensor(buffer.id());
    return static_cast<std::int64_t>(
        load_element(buffer.data(), tensor.dtype, at * tensor.strides[0]));
  }

  Tokens tokens(std::int64_t b, const std::string& side, bool ragged, std::int64_t full) const {
    if (!ragged) return {b, 0, full};
    const std::string valid = "cu_seqlens_" + side;
    const bool gaps = named(graph_, inputs_, valid + "_padded") != nullptr;
    return {0, integer(gaps ? valid + "_padded" : valid, b),
            integer(valid, b + 1) - integer(valid, b)};
  }
  Tokens queries(std::int64_t b) const { return tokens(b, "q", sizes_.ragged_q, sizes_.rows); }
  Tokens keys(std::int64_t b) const { return tokens(b, "kv", sizes_.ragged_kv, sizes_.columns); }

  std::int64_t last_token() const {
    std::int64_t last = 0;
    for (std::int64_t b = 0; b < sequences_; ++b) {
      last = std::max(last, keys(b).first + keys(b).length);
    }
    return last;
  }

  template <typename Value>
  void store(const std::string& name, Value value) {
    for (const auto& [graph, inputs] :
         {std::pair{&graph_, &inputs_}, std::pair{&plain_, &plain_inputs_}}) {
      const plan::Buffer& buffer = *named(*graph, *inputs, name);
      for_each_element(*graph, buffer,
                       [&](const ir::Tensor& tensor, const Dims& at, std::int64_t offset) {
                         store_element(buffer.data(), tensor.dtype, offset, value(at));
                       });
    }
  }

  void clear(const std::string& name) {
    store(name, [](const Dims&) { return 0.0; });
  }

  Status read(std::int64_t block) {
    const std::int64_t depth = sizes_.value_depth;
    store("v", [&](const Dims& at) {
      return at[2] / depth == block && at[2] % depth == at[3] ? 1.0 : 0.0;
    });
    LAWSON_TRY(const Judgement run, judge(engine_, device_, graph_, plan_, inputs_, {}, {}));
    LAWSON_TRY(const Judgement plain,
               judge(reference_, cpu_device(), plain_, plain_plan_, plain_inputs_, {}, {}));
    const auto weight = [](const ir::Graph& graph, const Judgement& from, const Dims& at) {
      const plan::Buffer& o = *named(graph, from.outputs, "o");
      const ir::Tensor& tensor = graph.tensor(o.id());
      return load_element(o.data(), tensor.dtype, offset_of(at, tensor.strides));
    };
    const Dims strides = contiguous_strides(sizes_.scores());
    for (std::int64_t b = 0; b < sequences_; ++b) {
      const Tokens q = queries(b);
      const Tokens kv = keys(b);
      for (std::int64_t j = 0; j < kv.length; ++j) {
        const std::int64_t token = kv.first + j;
        if (token / depth != block) continue;
        for (std::int64_t h = 0; h < sizes_.heads; ++h) {
          for (std::int64_t i = 0; i < q.length; ++i) {
            const Dims at{q.entry, h, q.first + i, token % depth};
            if (!(weight(plain_, plain, at) > 0)) continue;
            mask_[static_cast<std::size_t>(offset_of({b, h, i, j}, strides))] =
                weight(graph_, run, at) > 0 ? 1 : 0;
          }
        }
      }
    }
    return {};
  }

  Engine& engine_;
  const Device& device_;
  Engine& reference_;
  const Case& item_;
  ir::Graph graph_;
  ir::Graph plain_;  // without dropout
  Plan plan_;
  Plan plain_plan_;
  std::vector<plan::Buffer> inputs_;
  std::vector<plan::Buffer> plain_inputs_;
  ir::AttentionGeometry sizes_;
  std::int64_t sequences_ = 0;
  std::vector<double> mask_;
};

}  // namespace

Result<std::vector<double>> dumped_mask(Engine& engine, const Device& device, Engine& reference,
                                        const Case& item) {
  LAWSON_TRY(auto spec, forward_of(item));
  spec.return_dropout_mask = true;
  LAWSON_TRY(const ir::Graph graph, front::attention_graph(spec, spec.pass));
  LAWSON_TRY(const Plan plan, compiled(engine, device, graph, {}));
  LAWSON_TRY(auto inputs, plan::make_inputs(graph, item.seed, reference, item.style));
  LAWSON_TRY(const Judgement run, judge(engine, device, graph, plan, inputs, {}, {}));
  std::vector<double> mask;
  const plan::Buffer& buffer = *named(graph, run.outputs, "dropped");
  for_each_element(graph, buffer, [&](const ir::Tensor& tensor, const Dims&, std::int64_t offset) {
    const double value = load_element(buffer.data(), tensor.dtype, offset);
    mask.push_back(value <= 1 ? value : 2);
  });
  return mask;
}

Result<std::vector<double>> read_mask(Engine& engine, const Device& device, Engine& reference,
                                      const Case& item) {
  LAWSON_TRY(const auto spec, forward_of(item));
  return WeightReader(engine, device, reference, item).run(spec);
}

}  // namespace lawson::cases
