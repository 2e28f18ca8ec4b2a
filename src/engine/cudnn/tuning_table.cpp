#include "engine/cudnn/tuning_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/lazy.h"
#include "engine/cudnn/loader.h"

namespace lawson::cudnn {
namespace {

// Rows that a table has when it knows which configs are ever among the fastest.
constexpr std::size_t kProof = 10;
// A config that never came so near to a row's fastest is not worth building.
constexpr double kNearlyBest = 1.05;
// Beyond that the tables say nothing: the sizes differ by 2^4 in all, or by less and the layouts or
// the epilogue too.
constexpr double kFarthest = 4;
constexpr double kOtherType = 0.5;
constexpr double kOtherLayout = 1.5;
constexpr double kEpilogueStep = 0.25;
constexpr double kOneOfTwoProducts = 1.5;  // two accumulators: other tiles fit
// From there on a dim fills the device, and more of it changes nothing.
constexpr std::int64_t kLargest = 8192;

double apart(std::int64_t a, std::int64_t b) {
  const auto log = [](std::int64_t size) {
    return std::log2(static_cast<double>(std::clamp<std::int64_t>(size, 1, kLargest)));
  };
  return std::abs(log(a) - log(b));
}

// f16 and bf16 have the same kernels, and so have the two 8-bit floats.
std::string width_of(std::string type) {
  for (const auto& [name, width] :
       {std::pair{"bf16", "16"}, {"f16", "16"}, {"f8e4m3", "8"}, {"f8e5m2", "8"}}) {
    for (std::size_t at = type.find(name); at != std::string::npos; at = type.find(name)) {
      type.replace(at, std::string_view{name}.size(), width);
    }
  }
  return type;
}

Result<RankedPlan> plan_from_json(ObjectReader& row, const Json& item, const std::string& field) {
  if (!item.is_array() || item.size() != 2 || !item[0].is_string() || !item[1].is_number()) {
    return row.fail_value(field, item, "[\"eng2_k24=2\", milliseconds]");
  }
  RankedPlan plan{item[0].get<std::string>(), item[1].get<double>()};
  if (plan.name.find("eng") == std::string::npos) {
    return row.fail_value(field, item, "an engine config's name, \"eng2_k24=2\"");
  }
  if (!(plan.ms >= 0)) return row.fail_value(field, item, "milliseconds of 0 or more");
  return plan;
}

Result<TuningRow> row_from_json(const Json& item, const std::string& source,
                                const std::string& path) {
  ObjectReader reader(item, source, path);
  constexpr std::int64_t kMost = kMaxDim;
  TuningRow row;
  Workload& workload = row.workload;
  LAWSON_TRY(row.name, reader.string_or("name", ""));
  LAWSON_TRY(workload.a, reader.string("a"));
  LAWSON_TRY(workload.b, reader.string("b"));
  LAWSON_TRY(workload.layouts, reader.string("layouts"));
  if (workload.layouts.size() != 2 ||
      workload.layouts.find_first_not_of("rcx") != std::string::npos) {
    return reader.fail_value("layouts", workload.layouts, "two of r, c and x, as \"rr\"");
  }
  LAWSON_TRY(const std::string epilogue, reader.string("epilogue"));
  const auto known = epilogue_from_string(epilogue);
  if (!known) {
    return reader.fail_value("epilogue", epilogue, "none, pointwise, addend, reduce or dual");
  }
  workload.epilogue = *known;
  LAWSON_TRY(workload.m, reader.integer("m", 1, kMost));
  LAWSON_TRY(workload.n, reader.integer("n", 1, kMost));
  LAWSON_TRY(workload.k, reader.integer("k", 1, kMost));
  LAWSON_TRY(workload.batch, reader.integer("batch", 1, kMost));
  const Json* plans = reader.find("plans");
  if (plans == nullptr || !plans->is_array() || plans->empty()) {
    return reader.fail("plans", "missing or empty; expected a list of [name, milliseconds]");
  }
  for (std::size_t i = 0; i < plans->size(); ++i) {
    LAWSON_TRY(RankedPlan plan, plan_from_json(reader, (*plans)[i], fmt::format("plans[{}]", i)));
    row.plans.push_back(std::move(plan));
  }
  LAWSON_CHECK(reader.finish());
  return row;
}

std::vector<TuningTable> read_tables() {
  std::vector<TuningTable> tables;
  for (const TuningFile& file : kTuningFiles) {
    const auto document = parse_json(file.text, file.name);
    if (!document.ok()) continue;  // a unit test reads every file
    auto table = tuning_table_from_json(*document, file.name);
    if (table.ok()) tables.push_back(std::move(table).value());
  }
  return tables;
}

}  // namespace

std::optional<double> distance(const Workload& a, const Workload& b) {
  if (width_of(a.a) != width_of(b.a) || width_of(a.b) != width_of(b.b)) return std::nullopt;
  double result = apart(a.m, b.m) + apart(a.n, b.n) + apart(a.k, b.k) + apart(a.batch, b.batch);
  if (a.a != b.a || a.b != b.b) result += kOtherType;
  if (a.layouts != b.layouts) result += kOtherLayout;
  const int steps = std::abs(static_cast<int>(a.epilogue) - static_cast<int>(b.epilogue));
  result += kEpilogueStep * steps;
  if ((a.epilogue == Epilogue::dual) != (b.epilogue == Epilogue::dual)) {
    result += kOneOfTwoProducts;
  }
  return result;
}

Result<TuningTable> tuning_table_from_json(const Json& document, const std::string& source) {
  ObjectReader reader(document, source);
  TuningTable table;
  LAWSON_CHECK(reader.integer("lawson", 1, 1));
  LAWSON_TRY(const std::string kind, reader.string("kind"));
  if (kind != "tuning") return reader.fail_value("kind", kind, "\"tuning\"");
  LAWSON_TRY(table.device, reader.string("device"));
  LAWSON_TRY(const std::int64_t capability, reader.integer("compute_capability", 100, 9999));
  table.compute_capability = static_cast<int>(capability);
  LAWSON_TRY(table.driver, reader.string("driver"));
  LAWSON_TRY(table.cudnn, reader.string("cudnn"));
  LAWSON_TRY(table.date, reader.string("date"));
  const Json* rows = reader.find("rows");
  if (rows == nullptr || !rows->is_array()) {
    return reader.fail("rows", "missing; expected a list of measured workloads");
  }
  for (std::size_t i = 0; i < rows->size(); ++i) {
    const std::string path = fmt::format("rows[{}]", i);
    if (!(*rows)[i].is_object()) return reader.fail_value(path, (*rows)[i], "an object");
    LAWSON_TRY(TuningRow row, row_from_json((*rows)[i], source, path));
    table.rows.push_back(std::move(row));
  }
  LAWSON_CHECK(reader.finish());
  return table;
}

Json tuning_table_to_json(const TuningTable& table) {
  Json rows = Json::array();
  for (const TuningRow& row : table.rows) {
    Json plans = Json::array();
    for (const RankedPlan& plan : row.plans) {
      plans.push_back({plan.name, std::round(plan.ms * 1e5) / 1e5});
    }
    const Workload& workload = row.workload;
    rows.push_back({{"name", row.name},
                    {"a", workload.a},
                    {"b", workload.b},
                    {"layouts", workload.layouts},
                    {"epilogue", to_string(workload.epilogue)},
                    {"m", workload.m},
                    {"n", workload.n},
                    {"k", workload.k},
                    {"batch", workload.batch},
                    {"plans", std::move(plans)}});
  }
  return {{"lawson", 1},
          {"kind", "tuning"},
          {"device", table.device},
          {"compute_capability", table.compute_capability},
          {"driver", table.driver},
          {"cudnn", table.cudnn},
          {"date", table.date},
          {"rows", std::move(rows)}};
}

const std::vector<TuningTable>& tuning_tables() {
  static Lazy<const std::vector<TuningTable>> tables;
  return tables.get(read_tables);
}

bool same_family(const std::string& measured, int cudnn_version) {
  const std::string loaded = version_text(cudnn_version);
  return measured.substr(0, measured.rfind('.')) == loaded.substr(0, loaded.rfind('.'));
}

std::string NearestRow::text() const {
  return fmt::format("the tuning table: '{}' ({}) on {}, cuDNN {}, {}", row->name,
                     to_string(row->workload), table->device, table->cudnn, table->date);
}

namespace {

// The tables that say something about this device: its own, or where it has none those of the same
// compute capability.
std::vector<const TuningTable*> tables_of(const std::vector<TuningTable>& tables,
                                          const Device& device, int cudnn_version) {
  std::vector<const TuningTable*> own;
  std::vector<const TuningTable*> alike;
  for (const TuningTable& table : tables) {
    if (!same_family(table.cudnn, cudnn_version)) continue;
    if (table.device == device.name) own.push_back(&table);
    if (table.compute_capability == device.compute_capability) alike.push_back(&table);
  }
  return own.empty() ? alike : own;
}

}  // namespace

std::optional<NearestRow> nearest_row(const std::vector<TuningTable>& tables, const Device& device,
                                      int cudnn_version, const Workload& workload) {
  std::optional<NearestRow> best;
  double least = kFarthest;
  for (const TuningTable* table : tables_of(tables, device, cudnn_version)) {
    for (const TuningRow& row : table->rows) {
      const auto far = distance(row.workload, workload);
      if (!far || *far > least || (best && *far == least)) continue;
      least = *far;
      best = NearestRow{table, &row};
    }
  }
  return best;
}

std::set<std::string> proven_plans(const std::vector<TuningTable>& tables, const Device& device,
                                   int cudnn_version) {
  std::set<std::string> names;
  std::size_t rows = 0;
  for (const TuningTable* table : tables_of(tables, device, cudnn_version)) {
    for (const TuningRow& row : table->rows) {
      if (row.plans.size() > 1) ++rows;
      for (const RankedPlan& plan : row.plans) {
        if (plan.ms <= kNearlyBest * row.plans.front().ms) names.insert(plan.name);
      }
    }
  }
  return rows < kProof ? std::set<std::string>{} : names;
}

}  // namespace lawson::cudnn
