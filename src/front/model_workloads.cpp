// Layers -> spec documents (DESIGN: the one exchange form), per pass.
#include <algorithm>
#include <cmath>

#include "front/model_layers.h"

namespace lawson::front {
namespace {

// A graph spec under construction: operands are names, every op's result is f32.
class GraphSpec {
 public:
  explicit GraphSpec(const std::string& name) {
    document_ = {{"lawson", 1},          {"kind", "graph"},
                 {"name", name},         {"inputs", Json::array()},
                 {"ops", Json::array()}, {"outputs", Json::array()}};
  }

  std::string input(const std::string& name, const std::string& dtype, const Dims& shape,
                    const Dims& strides = {}) {
    Json item = {{"name", name}, {"dtype", dtype}, {"shape", shape}};
    if (!strides.empty()) item["strides"] = strides;
    document_["inputs"].push_back(std::move(item));
    return name;
  }

  std::string op(const std::string& op, const std::vector<std::string>& in, const std::string& out,
                 Json attributes = Json::object()) {
    attributes.update({{"op", op}, {"out", out}});
    if (!in.empty()) attributes["in"] = in;
    if (!attributes.contains("dtype")) attributes["dtype"] = "f32";
    document_["ops"].push_back(std::move(attributes));
    return out;
  }

  std::string constant(double value, const std::string& out) {
    return op("constant", {}, out, {{"value", value}});
  }

  std::string times(const std::string& x, double factor, const std::string& out) {
    return op("mul", {x, constant(factor, out + "_factor")}, out);
  }

  Json finish(const std::string& value, const std::string& dtype, const Dims& strides) {
    const std::string out =
        dtype == "f32" ? value : op("convert", {value}, "out", {{"dtype", dtype}});
    Json item = {{"name", out}};
    if (!strides.empty()) item["strides"] = strides;
    document_["outputs"].push_back(std::move(item));
    return std::move(document_);
  }

 private:
  Json document_;
};

class GemmSpec {
 public:
  GemmSpec(const GemmLayers& gemm, std::int64_t rows, const std::string& name,
           const std::string& dtype)
      : gemm_{gemm}, rows_{rows}, dtype_{dtype}, graph_{name} {}

  Json build() {
    graph_.input("x", dtype_, {gemm_.heads, rows_, gemm_.k}, gemm_.x_strides);
    std::string value = gemm_.gated ? gated() : post(product("w", "bias", "acc"));
    return graph_.finish(value, gemm_.f32_output ? "f32" : dtype_, gemm_.out_strides);
  }

 private:
  // x * w (+ bias), in f32.
  std::string product(const std::string& weight, const std::string& bias, const std::string& out) {
    Dims strides = gemm_.w_strides;
    if (strides.empty() && !gemm_.weight_in_out) {
      const Dims stored = contiguous_strides({gemm_.heads, gemm_.n, gemm_.k});  // of any sizes
      strides = {stored[0], stored[2], stored[1]};
    }
    graph_.input(weight, dtype_, {gemm_.heads, gemm_.k, gemm_.n}, strides);
    if (gemm_.bias) graph_.input(bias, dtype_, {1, 1, gemm_.n});
    std::string value = graph_.op("matmul", {"x", weight}, out);
    if (gemm_.bias) value = graph_.op("add", {value, bias}, out + "_biased");
    return value;
  }

  std::string post(std::string value) {
    if (gemm_.clip) {
      value = graph_.op("clamp", {value}, "clipped", {{"min", -*gemm_.clip}, {"max", *gemm_.clip}});
    }
    if (!gemm_.activation.empty()) value = activate(value, "activated");
    if (gemm_.multiply) value = graph_.times(value, *gemm_.multiply, "scaled");
    if (gemm_.softcap) {
      value = graph_.times(value, 1.0 / *gemm_.softcap, "capped");
      value = graph_.op("tanh", {value}, "capped_tanh");
      value = graph_.times(value, *gemm_.softcap, "capped_logits");
    }
    return value;
  }

  std::string activate(const std::string& x, const std::string& out) {
    return gemm_.activation == "quick_gelu" ? sigmoid_gate(x, out)
                                            : graph_.op(gemm_.activation, {x}, out);
  }

  // x * sigmoid(1.702 x)
  std::string sigmoid_gate(const std::string& x, const std::string& out) {
    const std::string sharp = graph_.times(x, 1.702, out + "_sharp");
    return graph_.op("mul", {x, graph_.op("sigmoid", {sharp}, out + "_sigmoid")}, out);
  }

  std::string gated() {
    std::string gate = product("w_gate", "bias_gate", "gate");
    std::string up = product("w_up", "bias_up", "up");
    if (gemm_.activation != "gpt_oss_swiglu") {
      return graph_.op("mul", {activate(gate, "gate_activated"), up}, "gated");
    }
    // (clamp(up) + 1) * g * sigmoid(1.702 g), with g cut above only.
    const double limit = *gemm_.limit;
    gate = graph_.op("min", {gate, graph_.constant(limit, "limit")}, "gate_clamped");
    up = graph_.op("clamp", {up}, "up_clamped", {{"min", -limit}, {"max", limit}});
    up = graph_.op("add", {up, graph_.constant(1.0, "one")}, "up_shifted");
    return graph_.op("mul", {sigmoid_gate(gate, "gate_activated"), up}, "gated");
  }

  const GemmLayers& gemm_;
  std::int64_t rows_;
  std::string dtype_;
  GraphSpec graph_;
};

enum class ModelPass { prefill, decode, training };

const char* name_of(ModelPass pass) {
  switch (pass) {
    case ModelPass::prefill:
      return "prefill";
    case ModelPass::decode:
      return "decode";
    case ModelPass::training:
      return "training";
  }
  return "";
}

std::string joined(const std::string& a, const std::string& b) {
  return a.empty() || b.empty() ? a + b : a + "; " + b;
}

// The one query row of a decode step is the newest token: it sees all of the cache, so the causal
// mask is void; what masks is each sequence's own length. ALiBi for one row is a vector per head.
void decode_fields(const AttentionLayers& attention, Json& spec, std::string& note) {
  spec["seqlen_q"] = 1;
  spec["seqlen_kv"] = attention.context;
  const bool padded = attention.causal || attention.padded;
  spec["mask"] = padded ? "padding" : "none";
  if (attention.bias != ScoreBias::none) {
    spec["bias"] = "post_scale";
    spec["bias_shape"] = {1, attention.heads, 1, attention.context};
  }
  if (padded) {
    note =
        joined(note, "the new token sees its sequence's whole cache: lengths mask, not causality");
  }
  if (attention.bias == ScoreBias::alibi) {
    note = joined(note, "ALiBi of one row is a bias vector per head");
  }
  note = joined(note, attention.decode_note);
}

void full_fields(const AttentionLayers& attention, ModelPass pass, Json& spec) {
  spec["seqlen_q"] = attention.seqlen_q;
  spec["seqlen_kv"] = attention.seqlen_kv;
  spec["mask"] = attention.causal ? "causal" : attention.padded ? "padding" : "none";
  if (attention.window_left >= 0 || attention.window_right >= 0) {
    spec["window"] = {attention.window_left, attention.window_right};
  }
  if (attention.bias == ScoreBias::alibi) spec["bias"] = "alibi";
  if (attention.bias == ScoreBias::relative) {
    spec["bias"] = "post_scale";
    spec["bias_shape"] = {1, attention.heads, attention.seqlen_q, attention.seqlen_kv};
    if (pass == ModelPass::training) spec["bias_grad"] = true;
  }
}

Workload attention_workload(const AttentionLayers& attention, ModelPass pass, std::int64_t batch,
                            const std::string& dtype, const std::string& name) {
  Workload workload{name, "attention", attention.layers, attention.note, {}};
  Json spec = {{"lawson", 1},
               {"kind", "attention"},
               {"name", name},
               {"pass", pass == ModelPass::training ? "training" : "forward"},
               {"dtype", dtype},
               {"layout", "bshd"},
               {"batch", batch},
               {"heads", attention.heads},
               {"kv_heads", attention.kv_heads},
               {"head_dim_qk", attention.head_dim_qk},
               {"head_dim_v", attention.head_dim_v}};
  if (attention.scale) spec["scale"] = *attention.scale;
  if (attention.softcap) spec["softcap"] = *attention.softcap;
  if (attention.sinks) spec["softmax"] = "learnable";
  if (!attention.v_strides.empty()) spec["strides"] = {{"v", attention.v_strides}};
  if (pass == ModelPass::training) spec["return_stats"] = true;
  if (pass == ModelPass::decode) {
    decode_fields(attention, spec, workload.note);
  } else {
    full_fields(attention, pass, spec);
  }
  workload.spec = std::move(spec);
  return workload;
}

std::int64_t rows_of(const GemmLayers& gemm, ModelPass pass) {
  switch (pass) {
    case ModelPass::prefill:
      return gemm.rows_prefill;
    case ModelPass::decode:
      return gemm.rows_decode;
    case ModelPass::training:
      return gemm.rows_training;
  }
  return 0;
}

bool runs(const AttentionLayers& attention, ModelPass pass) {
  return (pass == ModelPass::decode ? attention.context : attention.seqlen_q) > 0;
}

}  // namespace

void append_workloads(const Architecture& architecture, const ModelOptions& options,
                      const std::string& dtype, const std::string& prefix, Model& model) {
  std::vector<ModelPass> passes;
  for (const ModelPass pass : {ModelPass::prefill, ModelPass::decode, ModelPass::training}) {
    const auto& asked = options.passes;
    if (std::find(asked.begin(), asked.end(), name_of(pass)) != asked.end()) {
      passes.push_back(pass);
    }
  }
  for (const AttentionLayers& attention : architecture.attention) {
    for (const ModelPass pass : passes) {
      if (!runs(attention, pass)) continue;
      model.workloads.push_back(attention_workload(
          attention, pass, options.batch, dtype,
          fmt::format("{}attention.{}.{}", prefix, attention.kind, name_of(pass))));
    }
  }
  for (const GemmLayers& gemm : architecture.gemms) {
    // A pass with the rows of an earlier one computes the same product.
    std::vector<std::pair<std::int64_t, std::size_t>> seen;  // rows, workload
    for (const ModelPass pass : passes) {
      const std::int64_t rows = rows_of(gemm, pass);
      if (rows == 0) continue;
      const auto same = std::find_if(seen.begin(), seen.end(),
                                     [&](const auto& entry) { return entry.first == rows; });
      if (same != seen.end()) {
        Workload& earlier = model.workloads[same->second];
        earlier.note =
            joined(earlier.note, pass == ModelPass::training ? "the same in training's forward"
                                                             : "the same in decode");
        continue;
      }
      const std::string name = fmt::format("{}gemm.{}.{}", prefix, gemm.name, name_of(pass));
      seen.emplace_back(rows, model.workloads.size());
      const std::string note =
          pass == ModelPass::prefill ? joined(gemm.note, gemm.prefill_note) : gemm.note;
      model.workloads.push_back(
          {name, "gemm", gemm.layers, note, GemmSpec{gemm, rows, name, dtype}.build()});
    }
  }
}

}  // namespace lawson::front
