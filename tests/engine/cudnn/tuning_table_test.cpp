// Which measured row answers for a graph, and what a file of the tuning table may say.
#include "engine/cudnn/tuning_table.h"

#include <gtest/gtest.h>

#include "ir/json.h"

namespace lawson::cudnn {
namespace {

Json input(const char* name, const char* dtype, const Dims& shape, const Dims& strides = {}) {
  Json result{{"name", name}, {"dtype", dtype}, {"shape", shape}};
  if (!strides.empty()) result["strides"] = strides;
  return result;
}

ir::Graph graph_of(const Json& inputs, const Json& ops, const Json& outputs) {
  auto graph = ir::graph_from_json({{"lawson", 1},
                                    {"kind", "graph"},
                                    {"name", "test"},
                                    {"inputs", inputs},
                                    {"ops", ops},
                                    {"outputs", outputs}},
                                   "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return std::move(graph).value();
}

Workload workload(const Json& inputs, const Json& ops, const Json& outputs) {
  const auto result = workload_of(graph_of(inputs, ops, outputs));
  EXPECT_TRUE(result.has_value());
  return result.value_or(Workload{});
}

const Json kProduct{{"op", "matmul"}, {"in", {"x", "y"}}, {"out", "p"}};

TEST(WorkloadTest, SizesTypesAndLayoutsAreThoseInMemory) {
  const Json convert{{"op", "convert"}, {"in", {"x8"}}, {"out", "x"}, {"dtype", "bf16"}};
  const Json turn{{"op", "transpose"}, {"in", {"yt"}}, {"out", "y"}, {"perm", {0, 2, 1}}};
  const Workload found =
      workload({input("x8", "i8", {4, 32, 64}), input("yt", "bf16", {4, 128, 64})},
               {convert, turn, kProduct}, {"p"});
  EXPECT_EQ(found, (Workload{"i8>bf16", "bf16", "rc", Epilogue::none, 32, 128, 64, 4}));
}

TEST(WorkloadTest, StridesDecideTheLayout) {
  const Workload found =
      workload({input("x", "f16", {32, 64}, {1, 32}), input("y", "f16", {64, 16}, {32, 2})},
               Json::array({kProduct}), {"p"});
  EXPECT_EQ(found.layouts, "cx");
}

TEST(WorkloadTest, EpilogueIsWhatCostsMost) {
  const Json inputs{input("x", "bf16", {32, 64}), input("y", "bf16", {64, 48}),
                    input("row", "bf16", {1, 48}), input("z", "f32", {32, 48})};
  const auto pick = [&](std::initializer_list<int> which) {
    Json some = Json::array();
    for (const int i : which) some.push_back(inputs[static_cast<std::size_t>(i)]);
    return some;
  };
  const Json relu{{"op", "relu"}, {"in", {"p"}}, {"out", "q"}};
  const Json bias{{"op", "add"}, {"in", {"p", "row"}}, {"out", "q"}};
  const Json add{{"op", "add"}, {"in", {"p", "z"}}, {"out", "q"}};
  const Json sum{
      {"op", "reduce_sum"}, {"in", {"p"}}, {"out", "q"}, {"axes", {0}}, {"keepdims", true}};
  const Json second{{"op", "matmul"}, {"in", {"x", "y2"}}, {"out", "p2"}};
  const Json both{{"op", "mul"}, {"in", {"p", "p2"}}, {"out", "q"}};
  EXPECT_EQ(workload(pick({0, 1}), Json::array({kProduct}), {"p"}).epilogue, Epilogue::none);
  EXPECT_EQ(workload(pick({0, 1}), {kProduct, relu}, {"q"}).epilogue, Epilogue::pointwise);
  EXPECT_EQ(workload(pick({0, 1, 2}), {kProduct, bias}, {"q"}).epilogue, Epilogue::pointwise);
  EXPECT_EQ(workload(pick({0, 1, 3}), {kProduct, add}, {"q"}).epilogue, Epilogue::addend);
  EXPECT_EQ(workload(pick({0, 1}), {kProduct, relu}, {"p", "q"}).epilogue, Epilogue::addend);
  EXPECT_EQ(workload(pick({0, 1}), {kProduct, sum}, {"p", "q"}).epilogue, Epilogue::reduce);
  Json three = pick({0, 1});
  three.push_back(input("y2", "bf16", {64, 48}));
  EXPECT_EQ(workload(three, {kProduct, second, both}, {"q"}).epilogue, Epilogue::dual);
}

TEST(WorkloadTest, NoProductNoWorkload) {
  const Json relu{{"op", "relu"}, {"in", {"x"}}, {"out", "q"}};
  EXPECT_FALSE(
      workload_of(graph_of(Json::array({input("x", "f32", {8})}), Json::array({relu}), {"q"})));
}

TuningRow row(const char* name, const Workload& workload, const char* plan) {
  return {name, workload, {{plan, 1.0}}};
}

Workload bf16(std::int64_t m, std::int64_t n, std::int64_t k,
              Epilogue epilogue = Epilogue::pointwise, const char* layouts = "rr") {
  return {"bf16", "bf16", layouts, epilogue, m, n, k, 1};
}

Device device(const char* name, int compute_capability) {
  Device result;
  result.name = name;
  result.compute_capability = compute_capability;
  return result;
}

std::vector<TuningTable> tables() {
  const TuningTable h200{
      "h200",
      900,
      "580",
      "9.19.0",
      "2026-11-30",
      {row("large", bf16(4096, 4096, 4096), "eng2_k24=2"),
       row("skinny", bf16(16, 4096, 4096), "eng7_k24=1"),
       row("plain", bf16(4096, 4096, 4096, Epilogue::none), "eng2_k24=3"),
       row("columns", bf16(4096, 4096, 4096, Epilogue::pointwise, "rc"), "eng1_k24=1")}};
  const TuningTable gh200{"gh200",  900,          "580",
                          "9.19.1", "2026-12-01", {row("g", bf16(64, 64, 64), "eng7_k24=5")}};
  return {h200, gh200};
}

std::string found(const Device& device, const Workload& workload, int version = 91900) {
  const std::vector<TuningTable> all = tables();
  const auto nearest = nearest_row(all, device, version, workload);
  return nearest ? nearest->row->name : "";
}

TEST(TuningTableTest, NearestBySizesLayoutsAndEpilogue) {
  const Device h200 = device("h200", 900);
  EXPECT_EQ(found(h200, bf16(4096, 4096, 4096)), "large");
  EXPECT_EQ(found(h200, bf16(2048, 6144, 4096)), "large");
  EXPECT_EQ(found(h200, bf16(32, 4096, 8192)), "skinny");
  EXPECT_EQ(found(h200, bf16(4096, 4096, 4096, Epilogue::none)), "plain");
  EXPECT_EQ(found(h200, bf16(4096, 4096, 4096, Epilogue::dual)), "large");
  EXPECT_EQ(found(h200, bf16(4096, 4096, 4096, Epilogue::pointwise, "rc")), "columns");
  // A device that is full is full.
  EXPECT_EQ(found(h200, bf16(1 << 20, 4096, 4096)), "large");
}

TEST(TuningTableTest, WhatIsFarSaysNothing) {
  const Device h200 = device("h200", 900);
  EXPECT_EQ(found(h200, bf16(64, 64, 64)), "");
  Workload other = bf16(4096, 4096, 4096);
  other.a = "i8>bf16";
  EXPECT_EQ(found(h200, other), "");
}

TEST(TuningTableTest, BothHalfPrecisionsHaveTheSameKernels) {
  Workload half = bf16(4096, 4096, 4096);
  half.a = half.b = "f16";
  EXPECT_EQ(found(device("h200", 900), half), "large");
  EXPECT_GT(distance(half, bf16(4096, 4096, 4096)).value_or(0), 0);
}

TEST(TuningTableTest, OtherDevicesOfTheSameCapabilityAndNoOthers) {
  EXPECT_EQ(found(device("h100-sxm", 900), bf16(4096, 4096, 4096)), "large");
  EXPECT_EQ(found(device("b200", 1000), bf16(4096, 4096, 4096)), "");
  // A device with rows of its own does not look at others'.
  EXPECT_EQ(found(device("gh200", 900), bf16(4096, 4096, 4096)), "");
}

TEST(TuningTableTest, OnlyTheSameMinorVersionOfCudnn) {
  EXPECT_EQ(found(device("h200", 900), bf16(4096, 4096, 4096), 91902), "large");
  EXPECT_EQ(found(device("h200", 900), bf16(4096, 4096, 4096), 92000), "");
}

TEST(TuningTableTest, FilesAreReadBackAsWritten) {
  const TuningTable table = tables().front();
  const auto again = tuning_table_from_json(tuning_table_to_json(table), "test");
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(tuning_table_to_json(*again), tuning_table_to_json(table));
  ASSERT_EQ(again->rows.size(), 4U);
  EXPECT_EQ(again->rows[1].workload, table.rows[1].workload);
  EXPECT_EQ(again->rows[1].plans[0].name, "eng7_k24=1");
}

TEST(TuningTableTest, EveryFileOfThisBuildIsRead) {
  ASSERT_FALSE(kTuningFiles.empty());
  for (const TuningFile& file : kTuningFiles) {
    const auto document = parse_json(file.text, file.name);
    ASSERT_TRUE(document.ok()) << document.error().message;
    const auto table = tuning_table_from_json(*document, file.name);
    ASSERT_TRUE(table.ok()) << table.error().message;
    EXPECT_FALSE(table->rows.empty()) << file.name;
  }
  EXPECT_EQ(tuning_tables().size(), kTuningFiles.size());
}

struct BadFile {
  const char* pointer;
  Json value;
  const char* field;
};

TEST(TuningTableTest, AMalformedFileIsAnErrorThatNamesTheField) {
  const Json good = tuning_table_to_json(tables().front());
  const std::vector<BadFile> bad{{"/kind", "target", "'kind'"},
                                 {"/compute_capability", "9.0", "'compute_capability'"},
                                 {"/rows", 3, "'rows'"},
                                 {"/rows/1", 3, "'rows[1]'"},
                                 {"/rows/1/epilogue", "gelu", "'rows[1].epilogue'"},
                                 {"/rows/1/layouts", "row", "'rows[1].layouts'"},
                                 {"/rows/0/m", 0, "'rows[0].m'"},
                                 {"/rows/0/plans", Json::array(), "'rows[0].plans'"},
                                 {"/rows/0/plans/0", "eng2_k24=2", "'rows[0].plans[0]'"},
                                 {"/rows/0/plans/0/1", -1, "'rows[0].plans[0]'"},
                                 {"/rows/0/plans/0/0", "conv", "'rows[0].plans[0]'"},
                                 {"/rows/0/depth", 3, "'rows[0].depth'"},
                                 {"/colour", "red", "'colour'"}};
  for (const BadFile& item : bad) {
    Json document = good;
    document[Json::json_pointer{item.pointer}] = item.value;
    const auto table = tuning_table_from_json(document, "bad.json");
    ASSERT_FALSE(table.ok()) << item.pointer;
    EXPECT_NE(table.error().message.find(item.field), std::string::npos) << table.error().message;
    EXPECT_TRUE(table.error().message.starts_with("bad.json")) << table.error().message;
  }
}

}  // namespace
}  // namespace lawson::cudnn
