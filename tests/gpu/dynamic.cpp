// lawson-dynamic: plans with dynamic shapes. Needs a live device.
// Lengths of one family one after the other, in several orders (each in a family of its own, since
// the first length is what the family's kernel is compiled for), and from many threads at once:
// each has a plan with dynamic shapes that is right by the oracle. Writes one JSON document, with
// what a new length took; exits 1 when anything is wrong.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <thread>

#include "cases/cases.h"
#include "engine/registry.h"
#include "gpu/result.h"
#include "plan/planner.h"
#include "plan/verified_run.h"

namespace lawson::cases {
namespace {

using Clock = std::chrono::steady_clock;

struct Machine {
  plan::Planner& planner;
  Engine& cudnn;
  Engine& reference;
  const Device& live;
};

using Length = std::int64_t;
struct Family {
  std::string name;
  Json (*spec)(int variant, Length length);  // variants are different families
  bool is_dynamic = true;
};

// `ops` behind a product of [rows, k] and [k, 256]: "p" is f32; "b" and "z" are a vector and a
// matrix.
Json product(int variant, Length rows, const std::vector<Json>& ops) {
  const char* type = variant % 2 == 0 ? "bf16" : "f16";
  const Length k = 128 * variant;
  Json spec{{"lawson", 1},
            {"kind", "graph"},
            {"name", "dynamic"},
            {"inputs",
             {{{"name", "x"}, {"dtype", type}, {"shape", {rows, k}}},
              {{"name", "w"}, {"dtype", type}, {"shape", {k, 256}}},
              {{"name", "b"}, {"dtype", type}, {"shape", {256}}},
              {{"name", "z"}, {"dtype", "f32"}, {"shape", {rows, 256}}}}},
            {"ops", {{{"op", "matmul"}, {"in", {"x", "w"}}, {"out", "p"}, {"dtype", "f32"}}}},
            {"outputs", {"y"}}};
  for (const Json& op : ops) spec["ops"].push_back(op);
  spec["ops"].back()["dtype"] = type;
  return spec;
}

Json op(const char* name, const Json& operands, const char* result) {
  return {{"op", name}, {"in", operands}, {"out", result}};
}

const std::vector<Family>& families() {
  static const std::vector<Family> list{
      {"product", [](int variant,
                     Length length) { return product(variant, length, {op("relu", {"p"}, "y")}); }},
      {"product-bias-gelu",
       [](int variant, Length length) {
         return product(variant, length, {op("add", {"p", "b"}, "s"), op("gelu_tanh", {"s"}, "y")});
       }},
      {"product-residual",
       [](int variant, Length length) {
         return product(variant, length, {op("add", {"p", "z"}, "y")});
       }},
      {"attention",
       [](int variant, Length length) -> Json {
         return {{"lawson", 1},      {"kind", "attention"}, {"name", "dynamic"},
                 {"dtype", "bf16"},  {"pass", "forward"},   {"heads", 2 * variant},
                 {"mask", "causal"}, {"head_dim_qk", 64},   {"seqlen_q", length}};
       },
       false}};
  return list;
}

// The first is what a family's kernel is compiled for.
const std::vector<std::vector<Length>>& orders() {
  static const std::vector<std::vector<Length>> list{{512, 640, 1000, 77, 1024, 333, 64, 129, 2},
                                                     {333, 512, 77, 640, 1000, 128, 31, 576},
                                                     {1000, 64, 512, 448, 1024, 3}};
  return list;
}

struct Row {
  std::string family;
  int variant = 0;
  Length length = 0;
  bool is_first = false;
  std::string plan_id;
  std::string plan_name;
  bool is_dynamic = false;
  double ready_ms = 0;  // until its plan is loaded
  std::string problem;  // "" when right
};

Status examine(Machine& machine, const Family& family, Row& row) {
  const Case item{family.name, family.spec(row.variant, row.length), 7, plan::InputStyle::normal};
  LAWSON_TRY(const ir::Graph graph, graph_of(item));
  Options options;
  options.dynamic_shapes = true;
  const auto begin = Clock::now();
  LAWSON_TRY(const auto loaded,
             machine.planner.acquire(graph, machine.live, "cudnn", options, nullptr));
  row.ready_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  row.plan_id = loaded->plan().plan_id;
  row.plan_name = loaded->plan().plan_name;
  options.strength = Strength::built;
  LAWSON_TRY(const Verdict verdict, machine.planner.probe(graph, machine.live, "cudnn", options));
  row.is_dynamic =
      std::count(verdict.rewrites.begin(), verdict.rewrites.end(), "dynamic_shapes") == 1;
  if (verdict.plan_id != row.plan_id) {
    return error(ErrorKind::internal, "judged was plan {}, and {} is loaded", verdict.plan_id,
                 row.plan_id);
  }
  if (row.is_dynamic != family.is_dynamic) {
    return error(ErrorKind::internal, "its plan {} dynamic shapes",
                 row.is_dynamic ? "has" : "has no");
  }
  LAWSON_TRY(const auto compared,
             plan::run_and_compare(graph, loaded->plan(), machine.cudnn, machine.reference,
                                   machine.live, item.seed));
  if (!compared.ok()) return error(ErrorKind::internal, "wrong: {}", compared.text());
  return {};
}

void examine_all(Machine& machine, const Family& family, std::vector<Row>& rows) {
  for (Row& row : rows) {
    const Status status = examine(machine, family, row);
    if (!status.ok()) row.problem = status.error().message;
  }
}

std::vector<Row> rows_of(const Family& family, int variant, const std::vector<Length>& lengths) {
  std::vector<Row> rows;
  for (const Length length : lengths) {
    Row& row = rows.emplace_back();
    row.family = family.name;
    row.variant = variant;
    row.length = length;
    row.is_first = rows.size() == 1;
  }
  return rows;
}

Json to_json(const Row& row) {
  return {{"family", row.family},      {"variant", row.variant},   {"length", row.length},
          {"first", row.is_first},     {"plan_id", row.plan_id},   {"plan_name", row.plan_name},
          {"dynamic", row.is_dynamic}, {"ready_ms", row.ready_ms}, {"ok", row.problem.empty()},
          {"problem", row.problem}};
}

int run(const std::string& libexec, const std::string& json_path, const std::string& only) {
  plan::PlannerConfig config;
  config.engines = engines();
  config.worker_path = libexec + "/lawson-worker";
  config.nodriver_path = libexec + "/liblawson-nodriver.so";
  plan::Planner planner{std::move(config)};
  const auto devices = planner.devices();
  if (!devices.ok() || devices->front().kind != Device::Kind::cuda || !devices->front().present()) {
    std::cout << "no GPU here\n";
    return 77;
  }
  Machine machine{planner, *find_engine("cudnn"), *find_engine("reference"), devices->front()};
  std::vector<Row> all;
  for (const Family& family : families()) {
    if (family.name.find(only) == std::string::npos) continue;
    int variant = 0;
    for (const std::vector<Length>& lengths : orders()) {
      std::vector<Row> rows = rows_of(family, ++variant, lengths);
      examine_all(machine, family, rows);
      all.insert(all.end(), rows.begin(), rows.end());
    }
    // From many threads at once, each with lengths of its own.
    std::vector<std::vector<Row>> at_once;
    for (Length thread = 0; thread < 8; ++thread) {
      at_once.push_back(rows_of(family, variant + 1, {96 + 40 * thread, 101 + 40 * thread}));
    }
    std::vector<std::jthread> threads;
    for (std::vector<Row>& rows : at_once) {
      threads.emplace_back([&] { examine_all(machine, family, rows); });
    }
    threads.clear();
    for (const std::vector<Row>& rows : at_once) all.insert(all.end(), rows.begin(), rows.end());
  }
  Json document{{"gpu", machine.live.name}, {"rows", Json::array()}};
  std::size_t wrong = 0;
  std::vector<double> new_ms;
  for (const Row& row : all) {
    document["rows"].push_back(to_json(row));
    if (!row.problem.empty()) {
      ++wrong;
      std::cout << row.family << " " << row.variant << " length " << row.length << ": "
                << row.problem << '\n';
    } else if (row.is_dynamic && !row.is_first && row.variant <= 3) {
      new_ms.push_back(row.ready_ms);
    }
  }
  std::sort(new_ms.begin(), new_ms.end());
  if (!new_ms.empty()) {
    document["new_size_ms"] = {
        {"median", new_ms[new_ms.size() / 2]}, {"max", new_ms.back()}, {"count", new_ms.size()}};
    std::cout << "a new size: " << document["new_size_ms"] << " ms\n";
  }
  document["wrong"] = wrong;
  std::cout << all.size() << " plans, " << wrong << " wrong\n";
  const Status written = write_result(json_path, document);
  if (!written.ok()) std::cerr << written.error().message << '\n';
  return wrong == 0 && written.ok() ? 0 : 1;
}

}  // namespace
}  // namespace lawson::cases

int main(int argc, char** argv) {
  std::string libexec;
  std::string json;
  std::string only;
  CLI::App app{"Plans with dynamic shapes on a live GPU."};
  app.add_option("--libexec", libexec, "folder of lawson-worker");
  app.add_option("--json", json, "write the result here");
  app.add_option("--only", only, "families with this in their names");
  CLI11_PARSE(app, argc, argv);
  return lawson::cases::run(libexec, json, only);
}
