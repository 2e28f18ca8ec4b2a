#include "tuning_grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "ir/json.h"
#include "ir/simplify.h"

namespace lawson::bench {
namespace {

namespace fs = std::filesystem;
using cudnn::Epilogue;

// Nearer than this, what was measured already says what to try.
constexpr double kNear = 1.25;

struct Size {
  std::int64_t batch, m, n, k;
};

struct Operands {
  const char* a;  // in memory
  const char* b;
  const char* multiplied;
  const char* result;
  const char* layouts;
};

constexpr Operands kBf16{"bf16", "bf16", "bf16", "bf16", "rr"};
constexpr Operands kBf16Weights{"bf16", "bf16", "bf16", "bf16", "rc"};  // weights are [n, k]
constexpr Operands kBf16Gradients{"bf16", "bf16", "bf16", "bf16", "cr"};
constexpr Operands kF8{"f8e4m3", "f8e4m3", "f8e4m3", "bf16", "rc"};
constexpr Operands kInt8{"i8", "bf16", "bf16", "bf16", "rr"};
constexpr Operands kInt8Weights{"i8", "bf16", "bf16", "bf16", "rc"};
constexpr Operands kF32{"f32", "f32", "f32", "f32", "rr"};
constexpr Operands kF32Weights{"f32", "f32", "f32", "f32", "rc"};

constexpr Size kSquare{1, 4096, 4096, 4096};
constexpr Size kSmall{1, 1024, 1024, 1024};
constexpr Size kDecode{1, 16, 4096, 4096};
// Square ones, a model's two MLP products, batches, few rows.
constexpr Size kSizes[] = {{1, 2048, 2048, 2048},  {1, 8192, 8192, 8192},  {1, 4096, 11008, 4096},
                           {1, 4096, 4096, 11008}, {4, 1024, 1024, 1024},  {64, 512, 512, 512},
                           {1, 64, 4096, 4096},    {1, 256, 4096, 4096},   {1, 16, 11008, 4096},
                           {1, 16, 4096, 11008},   {1, 1024, 11008, 4096}, {1, 512, 1024, 1024},
                           {32, 256, 256, 256},    {1, 64, 11008, 4096},   {1, 64, 4096, 11008},
                           {1, 16384, 1024, 1024}, {1, 1024, 4096, 16384}};

Json operand(const char* name, const char* dtype, const Size& size, std::int64_t rows,
             std::int64_t columns, bool column_major) {
  Json shape = Json::array();
  Json strides = Json::array();
  if (size.batch > 1) {
    shape.push_back(size.batch);
    strides.push_back(rows * columns);
  }
  shape.insert(shape.end(), {rows, columns});
  if (!column_major) return {{"name", name}, {"dtype", dtype}, {"shape", shape}};
  strides.insert(strides.end(), {std::int64_t{1}, rows});
  return {{"name", name}, {"dtype", dtype}, {"shape", shape}, {"strides", strides}};
}

Json op(const char* name, const std::vector<std::string>& in, const char* out,
        const char* dtype = nullptr) {
  Json result{{"op", name}, {"in", in}, {"out", out}};
  if (dtype != nullptr) result["dtype"] = dtype;
  return result;
}

Json spec_of(const Operands& types, Epilogue epilogue, const Size& size) {
  const bool wide = std::string_view{types.result} == "f32";
  Json inputs = Json::array();
  Json ops = Json::array();
  Json outputs = Json::array({"c"});
  inputs.push_back(operand("a", types.a, size, size.m, size.k, types.layouts[0] == 'c'));
  inputs.push_back(operand("b", types.b, size, size.k, size.n, types.layouts[1] == 'c'));
  std::string a = "a";
  if (std::string_view{types.a} != types.multiplied) {
    ops.push_back(op("convert", {"a"}, "wide", types.multiplied));
    a = "wide";
  }
  ops.push_back(op("matmul", {a, "b"}, "product", "f32"));
  std::string last = "product";
  const auto then = [&](const char* name, const std::vector<std::string>& in, const char* out) {
    ops.push_back(op(name, in, out));
    last = out;
  };
  switch (epilogue) {
    case Epilogue::none:
      break;
    case Epilogue::pointwise:
      inputs.push_back(operand("bias", types.result, {1, 0, 0, 0}, 1, size.n, false));
      if (!wide) ops.push_back(op("convert", {"bias"}, "bias32", "f32"));
      then("add", {"product", wide ? "bias" : "bias32"}, "biased");
      then("gelu_tanh", {"biased"}, "active");
      break;
    case Epilogue::addend:
      inputs.push_back(operand("z", "f32", size, size.m, size.n, false));
      then("add", {"product", "z"}, "sum");
      break;
    case Epilogue::reduce: {
      Json reduce = op("reduce_amax", {"product"}, "amax");
      reduce["axes"] = size.batch > 1 ? Json{0, 1, 2} : Json{0, 1};
      reduce["keepdims"] = true;
      ops.push_back(std::move(reduce));
      outputs.push_back("amax");
      break;
    }
    case Epilogue::dual:
      inputs.push_back(operand("up", types.b, size, size.k, size.n, types.layouts[1] == 'c'));
      ops.push_back(op("matmul", {a, "up"}, "second", "f32"));
      then("silu", {"product"}, "gate");
      then("mul", {"gate", "second"}, "gated");
      break;
  }
  ops.push_back(op("convert", {last}, "c", types.result));
  std::string name = fmt::format("{} {} {}", types.a, types.layouts, to_string(epilogue));
  return {{"lawson", 1}, {"kind", "graph"},  {"name", std::move(name)},
          {"ops", ops},  {"inputs", inputs}, {"outputs", outputs}};
}

Result<Computation> computation_of(const Json& spec, const std::string& source) {
  LAWSON_TRY(const ir::Graph graph, ir::graph_from_json(spec, source));
  Computation result{graph.name, ir::simplify(graph), {}, false};
  const auto workload = cudnn::workload_of(result.graph);
  if (!workload) return invalid("{}: the graph has no matmul", source);
  result.workload = *workload;
  return result;
}

}  // namespace

Result<std::vector<Computation>> computations_of(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(folder, failure)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  if (failure) return error(ErrorKind::io, "cannot read {}: {}", folder, failure.message());
  // Plain products first: the others are then searched near what was fast for them.
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    return std::pair{a.stem().string().size(), a} < std::pair{b.stem().string().size(), b};
  });
  std::vector<Computation> list;
  for (const fs::path& file : files) {
    LAWSON_TRY(const std::string text, read_file(file.string()));
    LAWSON_TRY(const Json spec, parse_json(text, file.string()));
    LAWSON_TRY(Computation item, computation_of(spec, file.string()));
    item.thorough = std::none_of(list.begin(), list.end(), [&](const Computation& other) {
      return cudnn::distance(other.workload, item.workload).value_or(kNear + 1) <= kNear;
    });
    list.push_back(std::move(item));
  }
  return list;
}

Result<std::vector<Computation>> grid() {
  std::vector<Computation> list;
  Status failed;
  const auto add = [&](const Operands& types, Epilogue epilogue, const Size& size, bool thorough) {
    auto item = computation_of(spec_of(types, epilogue, size), "the grid");
    if (!item.ok()) {
      if (failed.ok()) failed = std::move(item).error();
      return;
    }
    item->thorough = thorough;
    list.push_back(std::move(item).value());
  };
  // What everything else of its types is searched near to.
  add(kBf16Weights, Epilogue::none, kSquare, true);
  add(kBf16Weights, Epilogue::none, kDecode, true);
  add(kBf16Weights, Epilogue::none, kSmall, true);
  add(kBf16, Epilogue::none, kSmall, true);
  add(kF8, Epilogue::none, kDecode, true);
  add(kF32, Epilogue::none, kSquare, true);
  add(kInt8, Epilogue::none, kSquare, true);
  add(kBf16Weights, Epilogue::dual, kSquare, true);
  add(kBf16Gradients, Epilogue::none, kSquare, true);
  for (const Operands* types : {&kBf16, &kBf16Weights}) {
    for (const Epilogue epilogue : {Epilogue::pointwise, Epilogue::addend, Epilogue::reduce}) {
      add(*types, epilogue, kSquare, false);
      add(*types, epilogue, kSmall, false);
    }
    add(*types, Epilogue::dual, kDecode, false);
    add(*types, Epilogue::pointwise, kDecode, false);
  }
  for (const Size& size : kSizes) {
    for (const Operands* types : {&kBf16, &kBf16Weights}) {
      add(*types, Epilogue::none, size, false);
      add(*types, Epilogue::pointwise, size, false);
    }
    add(kF8, Epilogue::pointwise, size, false);
    add(kInt8, Epilogue::pointwise, size, false);
    add(kF32, Epilogue::none, size, false);
  }
  for (const Size& size : kSizes) {
    add(kBf16Weights, Epilogue::dual, size, false);
    add(kBf16Weights, Epilogue::addend, size, false);
    add(kInt8Weights, Epilogue::none, size, false);
    add(kF32Weights, Epilogue::pointwise, size, false);
    add(kBf16Gradients, Epilogue::none, size, false);
  }
  LAWSON_CHECK(failed);
  return list;
}

}  // namespace lawson::bench
