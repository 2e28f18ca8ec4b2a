// targets: the GPUs that can be judged for.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "table.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

std::string property(const Json& device, const char* name) {
  const Json properties = device.value("properties", Json::object());
  return properties.contains(name) ? properties[name].dump() : "";
}

std::string memory_of(const Json& device) {
  const Json properties = device.value("properties", Json::object());
  const double bytes = properties.value("totalGlobalMem", 0.0);
  return bytes > 0 ? fmt::format("{:.0f} GiB", bytes / 1073741824.0) : "";
}

// "deviceless-published-target" -> "published"
std::string word_of(const std::string& evidence) {
  const std::size_t start = evidence.find('-') + 1;
  return evidence.substr(start, evidence.find('-', start) - start);
}

std::string table_of(const Json& devices) {
  Table table;
  table.column("target");
  table.column("device");
  table.column("cc", Table::Align::right);
  table.column("SMs", Table::Align::right);
  table.column("memory", Table::Align::right);
  table.column("properties");
  table.column("also called", Table::Align::left, true);
  for (const Json& device : devices) {
    const int ordinal = device.value("ordinal", -1);
    const auto evidence = device.value("evidence", std::string{});
    const bool is_gpu = device.contains("compute_capability");
    table.row(
        {{device.value("name", std::string{}), Style::bold},
         {device.value("title", std::string{})},
         {device.value("compute_capability", std::string{})},
         {property(device, "multiProcessorCount")},
         {memory_of(device)},
         {ordinal >= 0 ? fmt::format("live, cuda:{}", ordinal)
          : !is_gpu    ? "this machine"
                       : word_of(evidence),
          ordinal >= 0 || !is_gpu ? Style::good : Style::plain},
         {fmt::format("{}", fmt::join(device.value("aliases", std::vector<std::string>{}), ", ")),
          Style::dim}});
  }
  return table.text();
}

// What info says of cuDNN, in one line.
std::string cudnn_line(const Json& info) {
  const Json engines = info.value("engines", Json::object());
  Json cudnn = engines.is_object() ? engines.value("cudnn", Json::object()) : Json::object();
  if (cudnn.contains("cudnn") && cudnn["cudnn"].is_object()) cudnn = cudnn["cudnn"];
  const auto version = cudnn.value("version", std::string{});
  const auto path = cudnn.value("path", std::string{});
  if (version.empty()) {
    return "cuDNN: " + cudnn.value("error", std::string{"not found (lawson info says more)"});
  }
  return fmt::format("cuDNN {} from {}", version, path);
}

}  // namespace

void add_targets(CLI::App& app, Session& session) {
  CLI::App* verb =
      add_verb(app, session, "targets",
               "the GPUs that can be judged for, and cuDNN as it was found", "lawson targets");
  verb->callback([&session] {
    session.action = [&session] {
      const Json devices = json_of(lawson_devices_json);
      const Json info = json_of(lawson_info);
      if (session.json) {
        emit({{"targets", devices}, {"info", info}});
      } else {
        print_out(table_of(devices) + '\n' + cudnn_line(info) + '\n');
      }
      return kExitOk;
    };
  });
}

}  // namespace lawson::cli
