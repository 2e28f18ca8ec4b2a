// bench SPEC...: how long the plan of each graph takes, against what the device does at most.
#include <fmt/format.h>

#include <algorithm>

#include "input.h"
#include "place.h"
#include "table.h"
#include "terminal.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

struct BenchArguments {
  std::vector<std::string> specs;
  std::string target;
  ProbeOptions options;
  std::uint64_t seed = 0;
  std::int32_t rounds = 20;
  bool no_limits = false;
};

// What runs has to be what was judged: engine and plan id of verdict, plan and execution are one.
void assert_one(const Json& row, const char* field, const std::string& value) {
  if (row.at(field) == value) return;
  throw Failure("internal", kExitEnvironment,
                fmt::format("{}: {} is {} by its verdict, and {} ran", row.value("graph", ""),
                            field, row.at(field).dump(), value));
}

// The time that the device needs at least, by its limits, over the time that was measured.
void add_limit(Json& row, const Json& limits) {
  const double flops = row.at("flops").get<double>();
  const double bytes = row.at("bytes").get<double>();
  const double by_products = 1e3 * flops / limits.at("flops_per_second").get<double>();
  const double by_memory = 1e3 * bytes / limits.at("bytes_per_second").get<double>();
  const double least = std::max(by_products, by_memory);
  row["limit"] = {{"by", by_products >= by_memory ? "products" : "memory"},
                  {"milliseconds", least},
                  {"fraction", least / row.at("milliseconds").at("median").get<double>()}};
}

class Bench {
 public:
  explicit Bench(const BenchArguments& arguments)
      : arguments_{arguments},
        options_{arguments.options},
        place_{choose_place(arguments.options.engine, arguments.target)} {
    options_.engine = place_.engine;
    options_.strength = LAWSON_BUILT;
  }

  void run() {
    // All are read before any is timed.
    std::vector<std::pair<std::string, Spec>> specs;
    for (const std::string& path : arguments_.specs) {
      const Document document = read_document(path);
      specs.emplace_back(document.source, read_spec(document));
    }
    if (!arguments_.no_limits) {
      limits_ = json_of(lawson_device_limits, place_.device.get(), place_.engine.c_str());
    }
    for (const auto& [source, spec] : specs) {
      const std::size_t count = lawson_spec_graph_count(spec.get());
      if (count == 0) add(source, [&, &one = spec] { return refusal(one); });
      for (std::size_t i = 0; i < count; ++i) {
        add(source,
            [&, &one = spec] { return row_of(make<Graph>(lawson_spec_graph, one.get(), i)); });
      }
    }
  }

  Json json() const {
    Json out{{"target", lawson_device_name(place_.device.get())},
             {"engine", place_.engine},
             {"tuning", options_.tuning},
             {"seed", arguments_.seed},
             {"rows", rows_}};
    if (!limits_.is_null()) out["limits"] = limits_;
    return out;
  }

  std::string text() const {
    Table table;
    table.column("graph");
    table.column("plan", Table::Align::left, true);
    table.column("plan id");
    table.column("median", Table::Align::right);
    table.column("min", Table::Align::right);
    table.column("max", Table::Align::right);
    table.column("GFLOP/s", Table::Align::right);
    table.column("GB/s", Table::Align::right);
    if (!limits_.is_null()) table.column("of the limit", Table::Align::right);
    std::string failures;
    for (const Json& row : rows_) {
      const std::string name = row.value("graph", row.at("spec").get<std::string>());
      if (row.contains("error")) {
        failures += paint(name, Style::bold) + '\n' +
                    paragraph("  ", row["error"].value("message", std::string{}));
        continue;
      }
      const Json& times = row.at("milliseconds");
      std::vector<Cell> cells{{name},
                              {row.at("plan_name").get<std::string>(), Style::dim},
                              {row.at("plan_id").get<std::string>().substr(0, 12), Style::dim},
                              {milliseconds_text(times.at("median").get<double>())},
                              {milliseconds_text(times.at("min").get<double>()), Style::dim},
                              {milliseconds_text(times.at("max").get<double>()), Style::dim},
                              {rate(row, "flops_per_second")},
                              {rate(row, "bytes_per_second")}};
      if (row.contains("limit")) {
        cells.push_back({fmt::format("{:.0f}% {}", 100 * row["limit"]["fraction"].get<double>(),
                                     row["limit"]["by"].get<std::string>())});
      }
      table.row(std::move(cells));
    }
    std::string out =
        fmt::format("on {} · {} · tuning {}\n", lawson_device_name(place_.device.get()),
                    place_.engine, options_.tuning);
    if (!limits_.is_null()) {
      out += fmt::format(
          "limits: {} GFLOP/s ({}), {} GB/s ({})\n", rate(limits_, "flops_per_second"),
          limits_["product"]["what"].get<std::string>(), rate(limits_, "bytes_per_second"),
          limits_["copy"]["what"].get<std::string>());
    }
    return out + table.text() + failures;
  }

  // A "no" among the rows is an answer; what went wrong is told first.
  int exit_code() const {
    int code = kExitOk;
    for (const Json& row : rows_) {
      if (!row.contains("error")) continue;
      const auto kind = row["error"].value("kind", std::string{});
      const int of_row = kind == "unsupported"        ? kExitNo
                         : kind == "invalid_argument" ? kExitInput
                                                      : kExitEnvironment;
      code = std::max(code, of_row);
    }
    return code;
  }

 private:
  template <typename F>
  void add(const std::string& source, F measure) {
    Json row;
    try {
      row = measure();
      row["verdict"] = "supported";
    } catch (const Failure& failure) {
      row = {{"error", failure.json()}};
      if (failure.exit_code() == kExitNo) row["verdict"] = "unsupported";
    }
    row["spec"] = source;
    rows_.push_back(std::move(row));
  }

  Json row_of(const Graph& graph) const {
    const lawson_options options = options_.c();
    const Verdict verdict = make<Verdict>(lawson_probe, graph.get(), place_.device.get(), &options);
    const Json judged = json_of(lawson_verdict_json, verdict.get());
    if (lawson_verdict_decision(verdict.get()) != LAWSON_SUPPORTED) throw refused(graph, judged);
    Plan plan = make<Plan>(lawson_compile, graph.get(), place_.device.get(), &options);
    check(lawson_plan_load(plan.get(), place_.device.get()));
    Json row = json_of(lawson_plan_bench, plan.get(), arguments_.seed, arguments_.rounds);
    row["graph"] = lawson_graph_name(graph.get());
    for (const char* field : {"engine", "key"}) assert_one(row, field, judged.at(field));
    assert_one(row, "plan_id", lawson_plan_id(plan.get()));
    // A plan that was timed again may be another than the one that was judged.
    if (!options_.retune) assert_one(row, "plan_id", judged.value("plan_id", ""));
    const Json tuning = json_of(lawson_plan_tuning, plan.get());
    if (!tuning.empty()) row["tuning"] = tuning;
    if (!limits_.is_null()) add_limit(row, limits_);
    return row;
  }

  static Failure refused(const Graph& graph, const Json& verdict) {
    std::string message = lawson_graph_name(graph.get());
    for (const Json& reason : verdict.at("reasons")) {
      message += fmt::format("{} {}", message.ends_with(':') ? "" : ":",
                             reason.value("message", std::string{}));
    }
    return {"unsupported", kExitNo, message};
  }

  Json refusal(const Spec& spec) const {
    const Json verdict = probe(spec, place_.device, options_);
    std::string message = lawson_spec_name(spec.get());
    for (const Json& reason : verdict.at("reasons")) {
      message += ": " + reason.value("message", std::string{});
    }
    throw Failure("unsupported", kExitNo, message);
  }

  // In units of 1e9; "-" where there is nothing of the kind.
  static std::string rate(const Json& row, const char* field) {
    const double value = 1e-9 * row.at(field).get<double>();
    return value > 0 ? fmt::format("{:.{}f}", value, value < 100 ? 1 : 0) : "-";
  }

  const BenchArguments& arguments_;
  ProbeOptions options_;
  Place place_;
  Json limits_;
  std::vector<Json> rows_;
};

int run_bench(const Session& session, const BenchArguments& arguments) {
  Bench bench(arguments);
  bench.run();
  if (session.json) {
    emit(bench.json());
  } else {
    print_out(bench.text());
  }
  return bench.exit_code();
}

}  // namespace

void add_bench(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<BenchArguments>();
  CLI::App* verb = add_verb(app, session, "bench",
                            "time the plan of each spec on generated inputs, with several sets of "
                            "buffers in turn, against what the device does at most",
                            "lawson bench examples/specs/seed.json --engine cpu --tuning quick");
  verb->add_option("spec", arguments->specs, "spec files (docs/spec.md), or - for standard input")
      ->required()
      ->type_name("SPEC...");
  verb->add_option("-e,--engine", arguments->options.engine,
                   "cudnn, cpu or reference (default: LAWSON_ENGINE, else cudnn)")
      ->type_name("NAME");
  verb->add_option("-t,--target", arguments->target, "the device of this machine to run on")
      ->type_name("NAME");
  add_tuning_options(verb, arguments->options, true);
  verb->add_option("--rounds", arguments->rounds, "timed rounds of executions (default 20)")
      ->type_name("N")
      ->check(CLI::Range(1, 100000));
  add_seed_option(verb, arguments->seed);
  verb->add_flag("--no-limits", arguments->no_limits,
                 "leave out measuring what the device does at most, which takes seconds");
  add_trace_option(verb, session);
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_bench(session, *arguments); };
  });
}

}  // namespace lawson::cli
