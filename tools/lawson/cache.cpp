// cache list|verify|prune|export|import: the store on the disk.
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "input.h"
#include "table.h"
#include "terminal.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

using Store = Handle<lawson_store, lawson_store_destroy>;

Store open_store() {
  return make<Store>(lawson_store_open);
}

std::string folder_of(const Store& store) {
  return lawson_store_folder(store.get());
}

std::uint64_t total_bytes(const Json& entries) {
  std::uint64_t total = 0;
  for (const Json& entry : entries) total += entry["bytes"].get<std::uint64_t>();
  return total;
}

// "5 min ago"
std::string age_text(double seconds) {
  if (seconds < 90) return fmt::format("{:.0f} s ago", std::max(seconds, 0.0));
  if (seconds < 90 * 60) return fmt::format("{:.0f} min ago", seconds / 60);
  if (seconds < 36 * 3600) return fmt::format("{:.0f} h ago", seconds / 3600);
  return fmt::format("{:.0f} d ago", seconds / 86400);
}

std::string summary(const std::string& folder, const Json& entries) {
  return fmt::format("{}: {}, {}\n", folder,
                     entries.size() == 1 ? "1 entry" : fmt::format("{} entries", entries.size()),
                     bytes_text(static_cast<double>(total_bytes(entries))));
}

std::string list_text(const std::string& folder, const Json& entries) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  Table table;
  table.column("kind");
  table.column("key", Table::Align::left, true);
  table.column("target");
  table.column("engine");
  table.column("size", Table::Align::right);
  table.column("last use", Table::Align::right);
  for (const Json& entry : entries) {
    const bool is_bad = entry.contains("defect");
    const bool is_old = !entry.value("current", true);  // another build of Lawson's
    const Style style = is_bad ? Style::bad : is_old ? Style::dim : Style::plain;
    const auto text = [&](const char* field) { return entry.value(field, std::string{}); };
    const std::string engine = text("engine") + ' ' + text("engine_version");
    table.row({{text("kind"), style},
               {is_bad ? text("file") : text("key"), style},
               {text("target"), style},
               {is_bad ? "unreadable" : engine, style},
               {bytes_text(entry["bytes"].get<double>()), style},
               {age_text(now - entry["last_use"].get<double>()), style}});
  }
  return (entries.empty() ? "" : table.text()) + summary(folder, entries);
}

int run_list(const Session& session) {
  const Store store = open_store();
  const Json entries = json_of(lawson_store_list, store.get());
  if (session.json) {
    emit({{"folder", folder_of(store)}, {"bytes", total_bytes(entries)}, {"entries", entries}});
  } else {
    print_out(list_text(folder_of(store), entries));
  }
  return kExitOk;
}

int run_verify(const Session& session, bool remove) {
  const Store store = open_store();
  const Json entries = json_of(lawson_store_verify, store.get(), remove ? 1 : 0);
  Json bad = Json::array();
  Json left = Json::array();
  for (const Json& entry : entries) {
    if (entry.contains("defect")) bad.push_back(entry);
    if (!entry.contains("removed")) left.push_back(entry);
  }
  if (session.json) {
    emit({{"folder", folder_of(store)},
          {"entries", left.size()},
          {"bytes", total_bytes(left)},
          {"bad", bad}});
  } else {
    std::string out;
    for (const Json& entry : bad) {
      out += fmt::format(
          "{} {}{}: {}\n", paint("bad", Style::bad), entry["file"].get<std::string>(),
          entry.contains("removed") ? " (removed)" : "", entry["defect"].get<std::string>());
    }
    out += summary(folder_of(store), left);
    if (bad.empty()) out += "all of them sound\n";
    print_out(out);
  }
  return bad.empty() ? kExitOk : kExitNo;
}

struct PruneArguments {
  std::optional<std::uint64_t> to_size;     // bytes
  std::optional<std::uint64_t> older_than;  // seconds
  bool all = false;
};

int run_prune(const Session& session, const PruneArguments& arguments) {
  if (!arguments.to_size && !arguments.older_than && !arguments.all) {
    throw bad_usage("cache prune: say what may leave: --to-size SIZE, --older-than AGE or --all");
  }
  const Store store = open_store();
  std::int64_t max_bytes = -1;
  if (arguments.to_size) {
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    max_bytes = static_cast<std::int64_t>(std::min(*arguments.to_size, kMost));
  }
  const double max_age = arguments.older_than ? static_cast<double>(*arguments.older_than) : -1.0;
  const Json pruned =
      json_of(lawson_store_prune, store.get(), arguments.all ? 0 : max_bytes, max_age);
  if (pruned.contains("failure")) {
    print_warning(pruned["failure"].get<std::string>());
  }
  if (session.json) {
    Json document = pruned;
    document["folder"] = folder_of(store);
    emit(document);
  } else {
    print_out(fmt::format(
        "{}: {} removed ({}), {} left ({})\n", folder_of(store),
        pruned["removed"].get<std::uint64_t>(), bytes_text(pruned["removed_bytes"].get<double>()),
        pruned["kept"].get<std::uint64_t>(), bytes_text(pruned["kept_bytes"].get<double>())));
  }
  return pruned.contains("failure") ? kExitEnvironment : kExitOk;
}

// Of this build of Lawson, and sound; a plan that leaves the store meanwhile is left out. Of two
// for one key the library gives the one that was chosen with the device.
int run_export(const Session& session, const std::string& path) {
  const Store store = open_store();
  std::vector<Plan> plans;
  std::set<std::string> keys;
  for (const Json& entry : json_of(lawson_store_list, store.get())) {
    if (entry["kind"] != "plan" || entry.contains("defect") || !entry.value("current", false)) {
      continue;
    }
    lawson_plan* plan = nullptr;
    const auto key = entry["key"].get<std::string>();
    if (!keys.insert(key).second) continue;
    if (lawson_store_plan(store.get(), key.c_str(), &plan) == LAWSON_OK) {
      plans.emplace_back(plan);
    } else {
      print_warning(lawson_last_error_message());
    }
  }
  std::vector<const lawson_plan*> handles;
  for (const Plan& plan : plans) handles.push_back(plan.get());
  if (!handles.empty()) check(lawson_bundle_write(path.c_str(), handles.data(), handles.size()));
  if (session.json) {
    emit({{"folder", folder_of(store)},
          {"bundle", handles.empty() ? Json{} : Json(path)},
          {"plans", handles.size()}});
  } else if (handles.empty()) {
    print_out(fmt::format("{}: no plan to export; nothing is written\n", folder_of(store)));
  } else {
    print_out(fmt::format("{}: {}\n", path, counted(handles.size(), "plan")));
  }
  return handles.empty() ? kExitNo : kExitOk;
}

int run_import(const Session& session, const std::string& path) {
  const Store store = open_store();
  const Bundle bundle = open_bundle(path);
  const std::size_t count = lawson_bundle_size(bundle.get());
  Progress progress("importing", count);
  for (std::size_t i = 0; i < count; ++i) {
    const Plan plan = make<Plan>(lawson_bundle_plan, bundle.get(), i);
    check(lawson_store_keep(store.get(), plan.get()));
    progress.step();
  }
  if (session.json) {
    emit({{"folder", folder_of(store)}, {"bundle", path}, {"plans", count}});
  } else {
    print_out(fmt::format("{}: {} from {}\n", folder_of(store), counted(count, "plan"), path));
  }
  return kExitOk;
}

// Of CLI11's conversion, whose own words for a failure list every spelling of every unit.
CLI::Validator converting(const CLI::Validator& conversion, const std::string& expected) {
  const auto convert = [conversion, expected](std::string& text) {
    const std::string given = text;
    try {
      // A minus would be read as a very large number.
      if (!given.starts_with('-') && conversion(text).empty()) return std::string{};
    } catch (const CLI::ValidationError&) {  // said below
    }
    return fmt::format("'{}' is not {}", given, expected);
  };
  return CLI::Validator{convert, ""};
}

// "500MB" and "2GB" count in thousands, "512MiB" in 1024s.
void add_prune(CLI::App& cache, Session& session) {
  auto arguments = std::make_shared<PruneArguments>();
  CLI::App* verb = add_plain_verb(cache, session, "prune", "take away what was least recently used",
                                  "lawson cache prune --to-size 500MB --older-than 30d");
  verb->add_option("--to-size", arguments->to_size, "the most that may stay, as 500MB or 2GiB")
      ->type_name("SIZE")
      ->transform(converting(CLI::AsSizeValue{true}, "a size, as 500000, 500MB or 2GiB"));
  const std::map<std::string, std::uint64_t> units{
      {"s", 1}, {"min", 60}, {"h", 3600}, {"d", 86400}};
  const CLI::AsNumberWithUnit age{units, CLI::AsNumberWithUnit::UNIT_REQUIRED};
  verb->add_option("--older-than", arguments->older_than,
                   "what was not used for so long, as 90s, 30min, 12h or 30d")
      ->type_name("AGE")
      ->transform(converting(age, "a time, as 90s, 30min, 12h or 30d"));
  verb->add_flag("--all", arguments->all, "everything");
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_prune(session, *arguments); };
  });
}

}  // namespace

void add_cache(CLI::App& app, Session& session) {
  CLI::App* cache = app.add_subcommand("cache", "the store of plans and verdicts on the disk");
  cache->footer("Example:\n  lawson cache list");

  CLI::App* list = add_plain_verb(*cache, session, "list", "what is in it, the last used first",
                                  "lawson cache list --json");
  list->callback([&session] { session.action = [&session] { return run_list(session); }; });

  auto remove = std::make_shared<bool>(false);
  CLI::App* verify = add_plain_verb(*cache, session, "verify", "read and check every file of it",
                                    "lawson cache verify --remove");
  verify->add_flag("--remove", *remove, "take away what is bad");
  verify->callback([remove, &session] {
    session.action = [remove, &session] { return run_verify(session, *remove); };
  });

  add_prune(*cache, session);

  auto bundle = std::make_shared<std::string>();
  CLI::App* exports = add_plain_verb(*cache, session, "export", "its plans as one bundle",
                                     "lawson cache export plans.lawson");
  exports->add_option("bundle", *bundle, "the bundle to write")->required()->type_name("FILE");
  exports->callback([bundle, &session] {
    session.action = [bundle, &session] { return run_export(session, *bundle); };
  });

  CLI::App* imports = add_plain_verb(*cache, session, "import", "a bundle's plans into it",
                                     "lawson cache import plans.lawson");
  imports->add_option("bundle", *bundle, "the bundle to read")->required()->type_name("BUNDLE");
  imports->callback([bundle, &session] {
    session.action = [bundle, &session] { return run_import(session, *bundle); };
  });

  cache->allow_extras();  // only now: the verbs before would take it over
  cache->callback([cache] {
    if (!cache->get_subcommands().empty()) return;
    const std::vector<std::string> words = cache->remaining();
    throw bad_usage(
        fmt::format("cache: {}expected one of list, verify, prune, export, import",
                    words.empty() ? "" : fmt::format("'{}' is not a verb; ", words[0])));
  });
}

}  // namespace lawson::cli
