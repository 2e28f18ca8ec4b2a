// The op set of fusions in the real cuDNN, without a device: what is lowered, what is refused and
// in which words, and that no drawn graph crashes it, ends in an error or binds a wrong tensor.
#include <algorithm>
#include <map>
#include <set>

#include "cases/cases.h"
#include "engine/cudnn/deviceless.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/plan_bytes.h"

namespace lawson::cudnn {
namespace {

constexpr const char* kAll = "a100 l40s h200 b200";

Json in(const char* name, const char* dtype, const Dims& shape, const Dims& strides = {}) {
  Json input{{"name", name}, {"dtype", dtype}, {"shape", shape}};
  if (!strides.empty()) input["strides"] = strides;
  return input;
}

Json op(const char* name, const Json& operands, const Json& results, const Json& more = {}) {
  Json made{{"op", name}, {"in", operands}, {"out", results}};
  if (!more.is_null()) made.update(more);
  return made;
}

using List = std::vector<Json>;

ir::Graph graph(const List& inputs, const List& ops, const List& outputs, bool strict = false) {
  return graph_of({{"lawson", 1},
                   {"kind", "graph"},
                   {"name", "case"},
                   {"inputs", inputs},
                   {"ops", ops},
                   {"outputs", outputs},
                   {"strict", strict}});
}

// relu'd product [64, 64] of bf16, then `ops` from "p" and the inputs "z" f32 and "v" f32[64].
ir::Graph behind_product(List ops, const List& outputs) {
  ops.insert(ops.begin(), op("matmul", {"x", "w"}, "p", {{"dtype", "f32"}}));
  return graph({in("x", "bf16", {64, 64}), in("w", "bf16", {64, 64}), in("z", "f32", {64, 64}),
                in("v", "f32", {64})},
               ops, outputs);
}

// `ops` from "x" f32[48, 64] and "z" alike, without a product.
ir::Graph pointwise(const List& ops, const List& outputs, bool strict = false) {
  return graph({in("x", "f32", {48, 64}), in("z", "f32", {48, 64})}, ops, outputs, strict);
}

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> found;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (end > at) found.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return found;
}

bool says(const Verdict& verdict, const std::string& code, const std::string& part) {
  return std::any_of(verdict.reasons.begin(), verdict.reasons.end(), [&](const Reason& reason) {
    return reason.code == code && reason.message.find(part) != std::string::npos;
  });
}

void refused(const std::string& name, const ir::Graph& graph, const std::string& targets,
             const std::string& code, const std::string& part, Strength strength) {
  Options options;
  options.strength = strength;
  for (const std::string& target : words(targets)) {
    const Verdict verdict = probe(graph, target, options);
    EXPECT_EQ(verdict.decision, Decision::unsupported) << name << " on " << target;
    EXPECT_TRUE(says(verdict, code, part))
        << name << " on " << target << ": no '" << code << "' with '" << part << "' in\n"
        << text(verdict.reasons);
  }
}

// Every tensor that the plan asks for is one of the graph's, a part of one that lies inside it, or
// one of Lawson's own; and every output is written.
void check_bindings(const std::string& name, const ir::Graph& graph, const Plan& plan,
                    const Device& device) {
  auto unpacked = unpack_plan(plan.bytes);
  ASSERT_TRUE(unpacked.ok()) << name;
  if (unpacked->bytes.data.empty()) return;
  const Supplies& supplies = unpacked->bytes.supplies;
  std::unique_ptr<Executable> executable;
  const Failure failure = Executable::load(unpacked->bytes.data, nullptr, device, executable);
  ASSERT_FALSE(failure) << name << ": " << failure->text;
  std::map<std::int64_t, std::int64_t> caller;  // uid: bytes
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    const auto extent = storage_extent(tensor.shape, tensor.strides);
    caller[ir::Graph::uid(id)] =
        static_cast<std::int64_t>(byte_size(tensor.dtype, extent.value_or(0)));
  }
  std::set<std::int64_t> written;
  std::set<std::int64_t> seen;
  for (const std::int64_t uid : executable->uids()) {
    EXPECT_TRUE(seen.insert(uid).second) << name << ": tensor " << uid << " is asked for twice";
    const auto derived = std::find_if(supplies.derived.begin(), supplies.derived.end(),
                                      [&](const DerivedBinding& each) { return each.uid == uid; });
    const bool own = std::any_of(supplies.own.begin(), supplies.own.end(),
                                 [&](const OwnTensor& each) { return each.uid == uid; });
    if (derived != supplies.derived.end()) {
      ASSERT_TRUE(caller.contains(derived->source_uid)) << name;
      EXPECT_LT(derived->byte_offset, caller[derived->source_uid]) << name;
      EXPECT_GE(derived->byte_offset, 0) << name;
      written.insert(derived->source_uid);
    } else if (!own) {
      EXPECT_TRUE(caller.contains(uid)) << name << ": nobody knows tensor " << uid;
      written.insert(uid);
    }
  }
  for (ir::TensorId id = graph.input_count; id < graph.input_count + graph.output_count; ++id) {
    EXPECT_TRUE(written.contains(ir::Graph::uid(id)))
        << name << ": output " << graph.tensor(id).name << " is not written";
  }
}

void built(const std::string& name, const ir::Graph& graph, const std::string& targets) {
  for (const std::string& each : words(targets)) {
    const Device device = target(each);
    const auto plan = engine().compile(graph, device, {}, std::nullopt, {});
    ASSERT_TRUE(plan.ok()) << name << " on " << each << ": " << plan.error().message << "\n"
                           << text(plan.error().reasons);
    check_bindings(name + " on " + each, graph, *plan, device);
    EXPECT_TRUE(engine().load(*plan, device).ok()) << name << " on " << each;
  }
}

void judged(const std::string& name, const ir::Graph& graph, const std::string& targets) {
  for (const std::string& each : words(targets)) {
    const Verdict verdict = probe(graph, each);
    EXPECT_EQ(verdict.decision, Decision::supported) << name << " on " << each << "\n"
                                                     << text(verdict.reasons);
  }
}

TEST(Fusions, EveryPointwiseOpBehindAProductAndAlone) {
  for (const std::string& name : ir::all_op_names()) {
    const ir::Op made = *ir::op_from_name(name);
    const bool unary = std::holds_alternative<ir::Unary>(made);
    if (!unary && !std::holds_alternative<ir::UnaryGrad>(made) &&
        !std::holds_alternative<ir::Binary>(made)) {
      continue;
    }
    const Json after = unary ? Json{"p"} : Json{"z", "p"};
    const Json alone = unary ? Json{"x"} : Json{"z", "x"};
    const ir::Graph fused = behind_product({op(name.c_str(), after, "y")}, {"y"});
    const ir::Graph bare = pointwise({op(name.c_str(), alone, "y")}, {"y"});
    if (name == "log1p" || name == "expm1") {
      refused(name, fused, "h200", "op_not_in_cudnn", "op '" + name + "' (y)", Strength::judged);
      continue;
    }
    judged(name, fused, kAll);
    judged(name, bare, kAll);
  }
}

TEST(Fusions, GradientsAndCompositionsCompile) {
  List ops;
  std::string last = "p";
  for (const char* each :
       {"tanh_grad", "sigmoid_grad", "relu_grad", "leaky_relu_grad", "relu6_grad", "elu_grad",
        "softplus_grad", "silu_grad", "gelu_grad", "gelu_tanh_grad"}) {
    ops.push_back(op(each, {last, "z"}, std::string{each} + "_y"));
    last = std::string{each} + "_y";
  }
  built("gradients", behind_product(ops, {last}), kAll);
  built("round, sign, mod",
        pointwise({op("round", {"x"}, "a"), op("sign", {"z"}, "b"), op("mod", {"a", "z"}, "c"),
                   op("mul", {"b", "c"}, "y")},
                  {"y"}),
        "a100 h200 b200");
}

TEST(Fusions, ReductionsBehindAProduct) {
  for (const char* each : {"sum", "max", "min", "mean", "prod", "amax", "norm1"}) {
    for (const Json& axes : std::vector<Json>{{0}, {1}, {0, 1}}) {
      judged(
          each,
          behind_product(
              {op((std::string{"reduce_"} + each).c_str(), {"p"}, "y", {{"axes", axes}})}, {"y"}),
          kAll);
    }
  }
  refused("norm2", behind_product({op("reduce_norm2", {"p"}, "y", {{"axes", {1}}})}, {"y"}), "h200",
          "op_not_in_cudnn", "op 'reduce_norm2' (y)", Strength::judged);
}

TEST(Fusions, ReductionsAlone) {
  for (const char* each : {"sum", "max", "min", "mean", "amax", "norm1"}) {
    const std::string name = std::string{"reduce_"} + each;
    for (const Json& axes : std::vector<Json>{{0}, {1}, {0, 1}}) {
      judged(name, pointwise({op(name.c_str(), {"x"}, "y", {{"axes", axes}})}, {"y"}), kAll);
    }
  }
  built("a sum of products, and the products",
        pointwise({op("mul", {"x", "z"}, "y"),
                   op("reduce_sum", {"y"}, "s", {{"axes", {1}}, {"keepdims", true}}),
                   op("reduce_mean", {"y"}, "m", {{"axes", {0}}})},
                  {"y", "s", "m"}),
        kAll);
  refused("product", pointwise({op("reduce_prod", {"x"}, "y", {{"axes", {1}}})}, {"y"}), kAll,
          "graph_pattern", "op 'reduce_prod' (y)", Strength::judged);
  refused(
      "an axis in the middle",
      graph({in("x", "f32", {3, 48, 64})}, {op("reduce_sum", {"x"}, "y", {{"axes", {1}}})}, {"y"}),
      kAll, "graph_pattern", "op 'reduce_sum' (y)", Strength::judged);
  refused("something behind it",
          behind_product({op("reduce_max", {"p"}, "m", {{"axes", {1}}, {"keepdims", true}}),
                          op("sub", {"p", "m"}, "y")},
                         {"y"}),
          "h200", "reduction", "op 'reduce_max' (m)", Strength::judged);
  refused("a column-major operand",
          graph({in("x", "f32", {48, 64}, {1, 48})},
                {op("reduce_sum", {"x"}, "y", {{"axes", {1}}})}, {"y"}),
          kAll, "layout", "op 'reduce_sum' (y)", Strength::judged);
  const Json thirds = op("reduce_mean", {"x"}, "y", {{"axes", {0}}});
  refused("strict mean of 48", pointwise({thirds}, {"y"}, true), "h200", "strict", "divided by 48",
          Strength::judged);
  judged("strict mean of 64",
         pointwise({op("reduce_mean", {"x"}, "y", {{"axes", {1}}})}, {"y"}, true), "h200");
}

ir::Graph norm(const char* kind, const char* dtype, const char* scale, const Dims& shape,
               const Json& axes, const Json& results, const Dims& strides = {}) {
  Dims parameter(shape.begin() + axes.front().get<std::ptrdiff_t>(), shape.end());
  for (std::size_t i = 0; i < parameter.size(); ++i) {
    const auto axis = axes.front().get<std::size_t>() + i;
    if (std::find(axes.begin(), axes.end(), axis) == axes.end()) parameter[i] = 1;
  }
  Json operands{{"x", "x"}, {"scale", "s"}};
  List inputs{in("x", dtype, shape, strides), in("s", scale, parameter)};
  if (std::string{kind} == "layer_norm") {
    inputs.push_back(in("b", scale, parameter));
    operands["bias"] = "b";
  }
  List outputs;
  for (const auto& [slot, name] : results.items()) {
    outputs.push_back({{"name", name}});
    if (slot == "y" && !strides.empty()) outputs.back()["strides"] = strides;
  }
  return graph(inputs, {op(kind, operands, results, {{"axes", axes}, {"eps", 1e-6}})}, outputs);
}

ir::Graph norm_backward(const char* kind, const char* dtype, const char* scale, const Dims& shape,
                        const Json& results) {
  const std::string name = std::string{kind} + "_backward";
  const std::int64_t last = static_cast<std::int64_t>(shape.size()) - 1;
  Dims stats = shape;
  stats.back() = 1;
  List inputs{in("dy", dtype, shape), in("x", dtype, shape), in("s", scale, {shape.back()}),
              in("i", "f32", stats)};
  Json operands{{"dy", "dy"}, {"x", "x"}, {"scale", "s"}, {"inv_std", "i"}};
  if (std::string{kind} == "layer_norm") {
    inputs.push_back(in("m", "f32", stats));
    operands["mean"] = "m";
  }
  List outputs;
  for (const auto& [slot, result] : results.items()) outputs.push_back({{"name", result}});
  return graph(inputs, {op(name.c_str(), operands, results, {{"axes", {last}}})}, outputs);
}

TEST(Fusions, NormsForward) {
  const Json y{{"y", "y"}};
  for (const char* kind : {"layer_norm", "rms_norm"}) {
    built(kind, norm(kind, "bf16", "bf16", {4, 32, 96}, {2}, y), kAll);
    judged(kind, norm(kind, "f32", "f32", {3, 5, 7}, {2}, y), kAll);
    judged(kind, norm(kind, "f16", "f32", {3, 5, 7}, {1, 2}, y), kAll);
    // Channels last in memory, normalised over the channels.
    judged(kind, norm(kind, "bf16", "f32", {2, 64, 8, 8}, {1}, y, {4096, 1, 512, 64}), kAll);
    built(std::string{kind} + " with inv_std",
          norm(kind, "bf16", "f32", {4, 32, 96}, {2}, {{"y", "y"}, {"inv_std", "i"}}), kAll);
    const std::string label = std::string{"op '"} + kind + "' (y)";
    refused("f64", norm(kind, "f64", "f64", {4, 96}, {1}, y), kAll, "data_type", label,
            Strength::judged);
    refused("padded rows", norm(kind, "bf16", "f32", {4, 96}, {1}, y, {128, 1}), kAll, "strides",
            label, Strength::judged);
    refused("a column", norm(kind, "bf16", "f32", {4, 96}, {0}, y), kAll, "strides", label,
            Strength::judged);
  }
  built("layer_norm with mean",
        norm("layer_norm", "bf16", "f32", {4, 32, 96}, {2}, {{"y", "y"}, {"mean", "m"}}), kAll);
}

TEST(Fusions, NormsBackward) {
  for (const char* kind : {"layer_norm", "rms_norm"}) {
    built(kind,
          norm_backward(kind, "bf16", "bf16", {4, 32, 96},
                        {{"dx", "dx"}, {"dscale", "ds"}, {"dbias", "db"}}),
          kAll);
    for (const Json& results :
         std::vector<Json>{{{"dx", "dx"}}, {{"dscale", "ds"}}, {{"dx", "dx"}, {"dscale", "ds"}}}) {
      built(kind, norm_backward(kind, "f16", "f32", {31, 97}, results), kAll);
    }
  }
}

TEST(Fusions, NormsAreAlone) {
  const List inputs{in("x", "bf16", {4, 96}), in("s", "f32", {96})};
  const Json normed = op("rms_norm", {{"x", "x"}, {"scale", "s"}}, {{"y", "y"}}, {{"axes", {1}}});
  refused("behind it",
          graph(inputs, {normed, op("silu", {"y"}, "z", {{"source", "mlp.cpp:12"}})}, {"z"}), kAll,
          "norm_with_other_ops", "op 'silu' (z, at mlp.cpp:12)", Strength::judged);
  Json after = normed;
  after["in"]["x"] = "a";
  refused("before it", graph(inputs, {op("relu", {"x"}, "a"), after}, {"y"}), kAll,
          "norm_with_other_ops", "op 'relu' (a)", Strength::judged);
  // Views are strides.
  built("views around it",
        graph({in("x", "bf16", {2, 3, 96}), in("s", "f32", {96})},
              {op("reshape", {"x"}, "a", {{"shape", {6, 96}}}), after,
               op("reshape", {"y"}, "z", {{"shape", {3, 2, 96}}})},
              {"z"}),
        "h200");
}

ir::Graph scaled(const char* dtype, const char* scale, std::int64_t block, bool swizzled,
                 std::int64_t m, std::int64_t n, std::int64_t k, const List& ops = {},
                 const char* result = "p") {
  const auto up = [](std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; };
  const std::int64_t blocks = (k + block - 1) / block;
  const std::int64_t wide = swizzled ? up(blocks, 4) : blocks;
  const std::int64_t rows = swizzled ? up(m, 128) : m;
  const std::int64_t columns = swizzled ? up(n, 128) : n;
  List all{op("scaled_matmul", {{"a", "a"}, {"b", "b"}, {"a_scale", "sa"}, {"b_scale", "sb"}}, "p",
              {{"block", block}, {"swizzled", swizzled}, {"source", "mlp.cpp:7"}})};
  for (const Json& each : ops) all.push_back(each);
  return graph(
      {in("a", dtype, {m, k}), in("b", dtype, {k, n}, {1, k}), in("sa", scale, {rows, wide}),
       in("sb", scale, {wide, columns}, {1, wide}), in("z", "f32", {m, n})},
      all, {result});
}

TEST(Fusions, BlockScaledProducts) {
  const char* blackwell = "b200 gb300";
  built("mxfp8", scaled("f8e4m3", "f8e8m0", 32, true, 256, 256, 512), blackwell);
  built("mxfp8 e5m2, odd m and n", scaled("f8e5m2", "f8e8m0", 32, true, 100, 73, 96), blackwell);
  built("nvfp4", scaled("f4e2m1", "f8e4m3", 16, true, 256, 256, 512), blackwell);
  built("mxfp8 with a bias and gelu",
        scaled("f8e4m3", "f8e8m0", 32, true, 256, 256, 512,
               {op("add", {"p", "z"}, "q"), op("gelu", {"q"}, "r"),
                op("convert", {"r"}, "y", {{"dtype", "bf16"}})},
               "y"),
        blackwell);
  const std::string label = "op 'scaled_matmul' (p, at mlp.cpp:7)";
  for (const bool swizzled : {false, true}) {
    refused("older", scaled("f8e4m3", "f8e8m0", 32, swizzled, 256, 256, 512), "a100 l40s h200",
            "compute_capability", label, Strength::judged);
  }
  refused("in order", scaled("f8e4m3", "f8e8m0", 32, false, 256, 256, 512), blackwell,
          "block_scale", label, Strength::judged);
  refused("blocks of 16", scaled("f8e4m3", "f8e8m0", 16, true, 256, 256, 512), blackwell,
          "block_scale", label, Strength::judged);
  refused("k of 40", scaled("f8e4m3", "f8e8m0", 32, true, 128, 128, 40), blackwell, "strides",
          label, Strength::judged);
}

TEST(Fusions, Concatenation) {
  const List halves{op("relu", {"x"}, "a"), op("neg", {"x"}, "b"),
                    op("concat", {"a", "b"}, "y", {{"axis", 1}})};
  built("two results side by side", pointwise(halves, {"y"}), kAll);
  built("two results of a product, one above the other",
        behind_product({op("relu", {"p"}, "a"), op("mul", {"p", "z"}, "b"),
                        op("concat", {"a", "b"}, "y", {{"axis", 0}})},
                       {"y"}),
        kAll);
  refused("inputs", pointwise({op("concat", {"x", "z"}, "y", {{"axis", 0}})}, {"y"}), kAll,
          "concat", "op 'concat' (y)", Strength::judged);
  refused(
      "an operand of a product",
      graph({in("x", "bf16", {64, 32}), in("w", "bf16", {64, 64})},
            {op("concat", {"x", "x"}, "c", {{"axis", 1}}), op("matmul", {"c", "w"}, "y")}, {"y"}),
      "h200", "concat", "op 'concat' (c)", Strength::judged);
}

TEST(Fusions, ValuesWithoutOperandsAndViews) {
  built("a causal mask of indices",
        behind_product({op("iota", Json::array(), "i", {{"shape", {64, 1}}, {"axis", 0}}),
                        op("iota", Json::array(), "j", {{"shape", {64}}, {"axis", 0}}),
                        op("compare_ge", {"i", "j"}, "keep"),
                        op("constant", Json::array(), "low", {{"value", -1e30}}),
                        op("select", {"keep", "p", "low"}, "y")},
                       {"y"}),
        "a100 h200 b200");
  refused("indices without a product",
          pointwise(
              {op("iota", Json::array(), "i", {{"shape", {48, 64}}, {"axis", 1}, {"dtype", "f32"}}),
               op("add", {"x", "i"}, "y")},
              {"y"}),
          kAll, "iota", "op 'iota' (i)", Strength::judged);
  built("slices of inputs",
        graph({in("x", "bf16", {128, 64}), in("w", "bf16", {64, 96})},
              {op("slice", {"x"}, "a", {{"start", {32, 0}}, {"limit", {96, 64}}}),
               op("slice", {"w"}, "b", {{"start", {0, 16}}, {"limit", {64, 80}}}),
               op("matmul", {"a", "b"}, "p"), op("clamp", {"p"}, "y", {{"min", -1}, {"max", 2}})},
              {"y"}),
        "a100 h200 b200");
  refused(
      "a slice of a result",
      behind_product({op("slice", {"p"}, "y", {{"start", {0, 0}}, {"limit", {32, 64}}})}, {"y"}),
      "h200", "view_of_intermediate", "op 'slice' (y)", Strength::judged);
}

TEST(Fusions, BooleansWithoutAProduct) {
  const List inputs{in("x", "f32", {48, 64}), in("m", "bool", {48, 64})};
  built("a mask", graph(inputs, {op("neg", {"x"}, "n"), op("select", {"m", "x", "n"}, "y")}, {"y"}),
        "a100 h200 b200");
  built("masks of masks",
        graph(inputs,
              {op("compare_gt", {"x", "x"}, "g"), op("or", {"g", "m"}, "o"), op("not", {"o"}, "y")},
              {"y"}),
        "h200");
  built("bytes",
        graph({in("x", "i8", {48, 64}), in("y", "i8", {48, 64})},
              {op("add", {"x", "y"}, "z", {{"dtype", "i32"}})}, {"z"}),
        "h200");
  refused("integers",
          graph({in("x", "i32", {48, 64}), in("y", "i32", {48, 64})}, {op("add", {"x", "y"}, "z")},
                {"z"}),
          kAll, "data_type", "op 'add' (z)", Strength::judged);
}

TEST(Fusions, WhatFailsOnlyWhenBuiltNamesItsOperation) {
  const ir::Graph chain = graph(
      {in("x", "bf16", {64, 64}), in("y", "bf16", {64, 64}), in("z", "bf16", {64, 64})},
      {op("matmul", {"x", "y"}, "p"), op("matmul", {"p", "z"}, "q", {{"source", "two.py:9"}})},
      {"q"});
  judged("a product of a product", chain, "h200");
  refused("a product of a product", chain, "a100 h200", "kernel_does_not_compile",
          "op 'matmul' (q, at two.py:9)", Strength::built);
  const ir::Graph apart = graph({in("x", "bf16", {64, 64}, {128, 2}), in("w", "bf16", {64, 64})},
                                {op("matmul", {"x", "w"}, "y", {{"dtype", "f32"}})}, {"y"});
  refused("inner stride 2", apart, "h200", "kernel_does_not_compile", "x has strides [128, 2]",
          Strength::built);
}

TEST(Fusions, WhatCudnnTakesForAWrongCallIsRefusedBefore) {
  ir::Graph unaligned = pointwise({op("exp", {"x"}, "y")}, {{{"name", "y"}, {"alignment", 2}}});
  refused("alignment", unaligned, kAll, "alignment", "op 'exp' (y)", Strength::judged);
  refused("equal batches",
          graph({in("x", "bf16", {4, 64, 64}, {0, 64, 1}), in("w", "bf16", {64, 64})},
                {op("matmul", {"x", "w"}, "y")}, {"y"}),
          kAll, "matmul_operand", "op 'matmul' (y)", Strength::judged);
}

TEST(Fusions, RefusalsNameTheOperationAndItsResult) {
  ir::Graph strict =
      pointwise({op("convert", {"x"}, "h", {{"dtype", "bf16"}, {"source", "a.py:3"}}),
                 op("exp", {"h"}, "y", {{"dtype", "f32"}})},
                {"y"}, true);
  refused("strict", strict, "h200", "strict", "op 'convert' (h, at a.py:3)", Strength::judged);
  const ir::Graph vector =
      graph({in("x", "f32", {3, 27, 5}), in("v", "f32", {5})}, {op("add", {"x", "v"}, "y")}, {"y"});
  refused("defect", vector, "h200", "known_defect", "op 'add' (y)", Strength::judged);
  EXPECT_EQ(probe(vector, "h200").reasons.front().field, "y");
  EXPECT_EQ(probe(strict, "h200").reasons.front().field, "h");
}

TEST(Fusions, OneInputInTwoLayouts) {
  built("x times its transpose, plus itself",
        graph({in("x", "bf16", {64, 64})},
              {op("transpose", {"x"}, "t", {{"perm", {1, 0}}}),
               op("matmul", {"x", "t"}, "p", {{"dtype", "f32"}}),
               op("convert", {"x"}, "f", {{"dtype", "f32"}}), op("add", {"p", "f"}, "y")},
              {"y"}),
        kAll);
  built("two slices of one input",
        graph({in("x", "bf16", {128, 64})},
              {op("slice", {"x"}, "a", {{"start", {0, 0}}, {"limit", {64, 64}}}),
               op("slice", {"x"}, "b", {{"start", {64, 0}}, {"limit", {128, 64}}}),
               op("matmul", {"a", "b"}, "y")},
              {"y"}),
        kAll);
}

// The rows of the left operand, and those of the result, are three dims of which two are
// neighbours.
TEST(Fusions, RowsThatAreNoOneDimAreBatches) {
  const List inputs{in("x", "bf16", {4, 3, 16, 64}, {3072, 16, 1, 48}), in("w", "bf16", {64, 96}),
                    in("v", "f32", {96}), in("z", "f32", {192, 96})};
  const List plain{inputs[0], inputs[1]};
  const List ops{op("reshape", {"x"}, "a", {{"shape", {192, 64}}}), op("neg", {"a"}, "n"),
                 op("matmul", {"n", "w"}, "p", {{"dtype", "f32"}}), op("add", {"p", "v"}, "q"),
                 op("mul", {"q", "z"}, "r")};
  const ir::Graph whole = graph(inputs, ops, {"r"});
  built("input", whole, kAll);
  const Verdict verdict = probe(whole, "h200");
  EXPECT_EQ(verdict.rewrites, std::vector<std::string>{"rows_as_batches"});
  built("input and output",
        graph(plain,
              {ops[0], ops[1], op("matmul", {"n", "w"}, "p", {{"dtype", "f32"}}),
               op("reshape", {"p"}, "y", {{"shape", {4, 3, 16, 96}}})},
              {{{"name", "y"}, {"strides", {4608, 16, 1, 48}}}}),
        kAll);
  // x is read by both sides: its rows cannot be batches of one and not of the other.
  refused("both sides",
          graph({in("x", "bf16", {4, 3, 16, 64}, {3072, 16, 1, 48})},
                {op("reshape", {"x"}, "a", {{"shape", {192, 64}}}),
                 op("transpose", {"a"}, "b", {{"perm", {1, 0}}}), op("matmul", {"a", "b"}, "y")},
                {"y"}),
          "h200", "view", "op 'reshape' (a)", Strength::judged);
}

// Drawn graphs: judged on each architecture in turn, some of them built.
void drawn(cases::Profile profile, int count, int each_built) {
  const std::vector<std::string> targets = words("h200 a100 b200 l40s");
  int supported = 0;
  std::vector<cases::Case> list = cases::fusion_cases(20261130, count, profile);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto graph = cases::graph_of(list[i]);
    ASSERT_TRUE(graph.ok()) << list[i].name << ": " << graph.error().message;
    const std::string& name = targets[i % targets.size()];
    SCOPED_TRACE(list[i].text() + " on " + name);
    const Verdict verdict = probe(*graph, name);
    supported += verdict.decision == Decision::supported ? 1 : 0;
    if (verdict.decision != Decision::supported || i % static_cast<std::size_t>(each_built) != 0) {
      continue;
    }
    const auto plan = engine().compile(*graph, target(name), {}, std::nullopt, {});
    if (plan.ok()) {
      check_bindings(list[i].name, *graph, *plan, target(name));
    } else {
      EXPECT_EQ(plan.error().kind, ErrorKind::unsupported) << plan.error().message;
      EXPECT_FALSE(plan.error().reasons.empty());
    }
  }
  testing::Test::RecordProperty("supported", supported);
  EXPECT_GT(supported, 0);
}

TEST(Fusions, DrawnGraphsOfEverything) {
  drawn(cases::Profile::any, 400, 20);
}
TEST(Fusions, DrawnGraphsOfUsualKernels) {
  drawn(cases::Profile::gpu, 400, 10);
}

}  // namespace
}  // namespace lawson::cudnn
