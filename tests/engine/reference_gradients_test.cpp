// Every gradient of attention against central differences of the forward, over a covering array of
// what changes a gradient.
#include "cases/covering.h"
#include "reference_bench.h"

namespace lawson {
namespace {

// A level and what it adds to the spec.
struct Level {
  std::string name;
  Json fields;
};

const std::vector<std::pair<std::string, std::vector<Level>>>& axes() {
  static const std::vector<std::pair<std::string, std::vector<Level>>> list{
      {"layout",
       {{"dense", {{"layout", "sbhd_bshd_bhsd"}}},
        {"padding", {{"layout", "bshd"}, {"mask", "padding"}}},
        {"thd", {{"layout", "thd"}}},
        {"thd padded", {{"layout", "thd"}, {"padded_offsets", true}}},
        {"thd_bshd", {{"layout", "thd_bshd_bshd"}}}}},
      {"diagonal",
       {{"none", Json::object()},
        {"causal", {{"mask", "causal"}}},
        {"bottom_right", {{"mask", "causal_bottom_right"}}},
        {"window", {{"window", {2, 1}}}}}},
      {"lengths",
       {{"wide", {{"seqlen_q", 5}, {"seqlen_kv", 8}}},
        {"tall", {{"seqlen_q", 7}, {"seqlen_kv", 3}}}}},
      {"bias",
       {{"none", Json::object()},
        {"pre full", {{"bias", "pre_scale"}, {"bias_shape", {"b", "h", "q", "k"}}}},
        {"pre row", {{"bias", "pre_scale"}, {"bias_shape", {1, "h", 1, "k"}}}},
        {"post full", {{"bias", "post_scale"}, {"bias_shape", {"b", "h", "q", "k"}}}},
        {"post heads", {{"bias", "post_scale"}, {"bias_shape", {1, "h", "q", "k"}}}},
        {"post batch", {{"bias", "post_scale"}, {"bias_shape", {"b", 1, 1, "k"}}}},
        {"post column", {{"bias", "post_scale"}, {"bias_shape", {1, 1, "q", 1}}}},
        {"alibi", {{"bias", "alibi"}}},
        {"slopes", {{"bias", "alibi"}, {"alibi_slopes", {0.5, -0.25, 0, 1}}}}}},
      {"mask",
       {{"none", Json::object()},
        {"bool", {{"attn_mask", {{"dtype", "bool"}, {"shape", {1, 1, "q", "k"}}}}}},
        {"added", {{"attn_mask", {{"dtype", "f64"}, {"shape", {"b", "h", 1, "k"}}}}}}}},
      {"softmax",
       {{"vanilla", Json::object()},
        {"off_by_one", {{"softmax", "off_by_one"}}},
        {"learnable", {{"softmax", "learnable"}}}}},
      {"softcap", {{"none", Json::object()}, {"softcap", {{"softcap", 1.5}}}}},
      {"dropout",
       {{"none", Json::object()},
        {"stream", {{"dropout", 0.3}}},
        {"mask", {{"dropout", 0.3}, {"dropout_mask", true}}}}},
      {"heads",
       {{"groups", {{"kv_heads", 2}}},
        {"equal", {{"kv_heads", 4}}},
        {"one", {{"kv_heads", 1}, {"scale", 0.7}}}}},
      {"infinities", {{"none", Json::object()}, {"some", Json::object()}}},
  };
  return list;
}

std::vector<cases::Axis> covering_axes() {
  std::vector<cases::Axis> result;
  for (const auto& [name, levels] : axes()) {
    cases::Axis axis;
    axis.name = name;
    for (const Level& level : levels) axis.levels.push_back(level.name);
    result.push_back(std::move(axis));
  }
  return result;
}

void fill_in_sizes(Json& shape, const Json& spec) {
  for (Json& size : shape) {
    if (!size.is_string()) continue;
    const char which = size.get<std::string>()[0];
    size = which == 'b'   ? spec["batch"]
           : which == 'h' ? spec["heads"]
           : which == 'q' ? spec["seqlen_q"]
                          : spec["seqlen_kv"];
  }
}

Json spec_of(const cases::Row& row) {
  Json spec = attention({{"batch", 3}, {"head_dim_qk", 3}, {"head_dim_v", 2}});
  std::string mask;
  for (std::size_t axis = 0; axis < row.size(); ++axis) {
    Json fields = axes()[axis].second[row[axis]].fields;
    if (fields.contains("mask")) {
      if (!mask.empty()) mask += '_';
      mask += fields["mask"].get<std::string>();
      fields.erase("mask");
    }
    spec.update(fields);
  }
  if (!mask.empty()) spec["mask"] = mask;
  if (spec.contains("bias_shape")) fill_in_sizes(spec["bias_shape"], spec);
  if (spec.contains("attn_mask")) fill_in_sizes(spec["attn_mask"]["shape"], spec);
  return spec;
}

std::string text_of(const cases::Row& row) {
  std::string text;
  for (std::size_t axis = 0; axis < row.size(); ++axis) {
    text += fmt::format("{} {}, ", axes()[axis].first, axes()[axis].second[row[axis]].name);
  }
  return text;
}

// Some elements of the tensors that scores are added to become -infinity.
void add_infinities(Bench& bench) {
  for (const char* name : {"bias", "mask"}) {
    if (!bench.has(bench.inputs, name)) continue;
    auto values = bench.values(name);
    for (std::size_t i = 1; i < values.size(); i += 3) {
      if (bench.graph.tensor(bench.input(name).id()).dtype != DType::boolean)
        values[i] = -kInfinity;
    }
    bench.set(name, values);
  }
}

class Differences {
 public:
  Differences(const Json& spec, std::uint64_t seed, bool infinities)
      : forward_{graph_of(spec, "forward"), seed}, backward_{graph_of(spec, "backward"), seed} {
    if (infinities) {
      add_infinities(forward_);
      add_infinities(backward_);
    }
    forward_.execute();
    backward_.set("o", forward_.values("o"));
    backward_.set("stats", forward_.values("stats"));
    backward_.execute();
    dout_ = backward_.values("do");
  }

  // Compares a gradient at some of its elements; returns how many.
  int check(const std::string& gradient) {
    const std::string name = gradient.substr(1);
    const auto slopes = backward_.values(gradient);
    const auto original = forward_.values(name);
    EXPECT_EQ(slopes.size(), original.size());
    int checked = 0;
    for (const std::size_t i : chosen(slopes)) {
      if (!std::isfinite(original[i])) {
        EXPECT_EQ(slopes[i], 0) << name << ' ' << i;
        continue;
      }
      // The sink is f32: a step that it can represent, and a coarser comparison.
      const bool coarse = name == "sink";
      const double step = coarse ? 0x1p-10 : 0x1p-17;
      const auto [above, up] = loss_at(name, original, i, original[i] + step);
      const auto [below, down] = loss_at(name, original, i, original[i] - step);
      EXPECT_NEAR(slopes[i], (above - below) / (up - down), coarse ? 1e-5 : 1e-7)
          << gradient << ' ' << i;
      ++checked;
    }
    forward_.set(name, original);
    return checked;
  }

  const Bench& backward() const { return backward_; }
  // Gradients are written where there is something, and NaN nowhere else.
  void expect_written_where_specified() {
    for (const OracleOutput& output : backward_.oracle(kF32)) {
      const ir::Tensor& tensor = backward_.graph.tensor(output.id);
      const auto values = backward_.values(tensor.name);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(std::isnan(values[i]), output.bounds[i] == kInfinity) << tensor.name << ' ' << i;
      }
    }
  }

 private:
  static ir::Graph graph_of(Json spec, const char* pass) {
    spec["pass"] = pass;
    if (std::string{pass} == "backward") {
      spec.erase("return_stats");
      if (spec.contains("bias_shape")) spec["bias_grad"] = true;
    }
    return graph_of_case({"test", spec, 1, plan::InputStyle::normal});
  }

  // Evenly among those that were written; the steepest too.
  static std::vector<std::size_t> chosen(const std::vector<double>& slopes) {
    std::vector<std::size_t> written;
    for (std::size_t i = 0; i < slopes.size(); ++i) {
      if (!std::isnan(slopes[i])) written.push_back(i);
    }
    if (written.empty()) return {};
    std::vector<std::size_t> result{*std::max_element(
        written.begin(), written.end(),
        [&](std::size_t a, std::size_t b) { return std::fabs(slopes[a]) < std::fabs(slopes[b]); })};
    for (std::size_t n = 0; n < written.size(); n += 1 + written.size() / 9) {
      result.push_back(written[n]);
    }
    return result;
  }

  // sum dout * O with one element moved, and what became of the element in memory.
  std::pair<double, double> loss_at(const std::string& name, std::vector<double> values,
                                    std::size_t i, double value) {
    values[i] = value;
    forward_.set(name, values);
    forward_.execute();
    const auto o = forward_.values("o");
    double sum = 0;
    for (std::size_t n = 0; n < o.size(); ++n) {
      if (!std::isnan(o[n])) sum += o[n] * dout_[n];
    }
    return {sum, forward_.values(name)[i]};
  }

  Bench forward_;
  Bench backward_;
  std::vector<double> dout_;
};

TEST(ReferenceGradients, AreFiniteDifferences) {
  const auto accept = [](const cases::Row& row) {
    const Json spec = spec_of(row);
    return cases::graph_of({"test", spec, 1, plan::InputStyle::normal}).ok();
  };
  const auto all = covering_axes();
  cases::Covering covering(all, 7, all.size(), accept);
  std::map<std::string, int> checked;
  std::uint64_t seed = 1;
  while (const auto row = covering.next()) {
    const Json spec = spec_of(*row);
    SCOPED_TRACE(text_of(*row) + spec.dump());
    Differences differences(spec, seed++, row->back() == 1);
    differences.expect_written_where_specified();
    for (const char* gradient : {"dq", "dk", "dv", "dbias", "dsink"}) {
      const Bench& backward = differences.backward();
      if (backward.has(backward.outputs, gradient)) {
        checked[gradient] += differences.check(gradient);
      }
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(seed, 40U);
  for (const auto& [gradient, least] :
       {std::pair{"dq", 300}, {"dk", 300}, {"dv", 300}, {"dbias", 150}, {"dsink", 40}}) {
    EXPECT_GT(checked[gradient], least) << gradient;
  }
  for (const std::string& pair : covering.impossible()) ADD_FAILURE() << pair;
}

}  // namespace
}  // namespace lawson
