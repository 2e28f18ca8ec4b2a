#include "plan/store.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <utility>

#include "plan/store_build.h"
#include "plan/store_content.h"
#include "plan/store_folder.h"

namespace lawson::plan {
namespace {

// How much of the budget is written before the folder is surveyed again.
constexpr std::uint64_t kSurveyShare = 16;
// The part of the budget that a full store makes free, so that not every write has to make room.
constexpr std::uint64_t kFreedShare = 10;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string{} : std::string{value};
}

std::string_view text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

EntryHeader question_of(EntryKind kind, const std::string& key, bool deviceless = false) {
  EntryHeader header;
  header.kind = kind;
  header.key = key;
  header.lawson = library_build();
  header.deviceless = deviceless;
  return header;
}

EntryHeader header_of(const Plan& plan) {
  EntryHeader header = question_of(EntryKind::plan, plan.key, plan.deviceless);
  header.engine = plan.engine;
  header.engine_version = plan.engine_version;
  header.target = plan.target;
  return header;
}

EntryHeader header_of(const Verdict& verdict) {
  EntryHeader header =
      question_of(EntryKind::verdict, verdict.key, verdict.evidence != Evidence::live);
  header.engine = verdict.engine;
  header.engine_version = verdict.engine_version;
  header.target = verdict.target;
  return header;
}

// Nothing that a store meets may fail its caller, running out of memory included.
template <typename Work>
auto contained(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return error(ErrorKind::out_of_memory, "out of memory");
  } catch (const std::exception& failure) {
    return error(ErrorKind::internal, "{}", failure.what());
  }
}

}  // namespace

std::string_view to_string(Store::Mode mode) {
  return mode == Store::Mode::off ? "off" : mode == Store::Mode::ro ? "ro" : "rw";
}

bool settles(const Verdict& verdict, Strength at_least) {
  return verdict.decision == Decision::unsupported || verdict.strength >= at_least;
}

Result<Store::Config> Store::environment() {
  Config config;
  const std::string mode = variable("LAWSON_CACHE");
  if (mode == "off") return config;
  if (!mode.empty() && mode != "ro" && mode != "rw") {
    return invalid("LAWSON_CACHE: '{}' is not allowed; expected off, ro or rw", mode);
  }
  std::string root = variable("LAWSON_CACHE_DIR");
  if (root.empty()) {
    const std::string xdg = variable("XDG_CACHE_HOME");
    const std::string home = variable("HOME");
    if (xdg.starts_with('/')) {  // the specification of XDG has relative ones ignored
      root = xdg + "/lawson";
    } else if (!home.empty()) {
      root = home + "/.cache/lawson";
    } else {
      return config;
    }
  }
  config.mode = mode == "ro" ? Mode::ro : Mode::rw;
  config.folder = root + "/store";
  return config;
}

Store::Store(Config config) : config_{std::move(config)}, unsurveyed_bytes_{config_.budget_bytes} {}

std::optional<Plan> Store::plan(const std::string& key, bool deviceless) {
  if (config_.mode == Mode::off) return std::nullopt;
  auto found = contained([&] { return read_plan(key, deviceless, true); });
  if (found.ok()) return std::move(found).value();
  warn(Operation::read, found.error());
  return std::nullopt;
}

void Store::keep(const Plan& plan) {
  if (config_.mode != Mode::rw) return;
  const Status kept = contained([&] { return add(plan); });
  if (!kept.ok()) warn(Operation::write, kept.error());
}

std::optional<Verdict> Store::verdict(const std::string& key, Strength at_least, bool deviceless) {
  if (config_.mode == Mode::off) return std::nullopt;
  auto found = contained([&] { return read_verdict(key, deviceless, true); });
  if (!found.ok()) {
    warn(Operation::read, found.error());
    return std::nullopt;
  }
  if (*found && !settles(**found, at_least)) return std::nullopt;
  return std::move(found).value();
}

void Store::keep(const Verdict& verdict) {
  if (config_.mode != Mode::rw || verdict.decision == Decision::undecided ||
      verdict.engine_version.empty()) {
    return;
  }
  const Status kept = contained([&]() -> Status {
    const EntryHeader header = header_of(verdict);
    const auto there = read_verdict(verdict.key, header.deviceless, false);
    if (there.ok() && *there && settles(**there, verdict.strength)) return {};
    std::string content;
    Json::to_cbor(verdict_to_json(verdict), content);
    return write(header, content);
  });
  if (!kept.ok()) warn(Operation::write, kept.error());
}

std::optional<std::string> Store::content(EntryKind kind, const std::string& key) {
  if (config_.mode == Mode::off) return std::nullopt;
  auto found = contained([&] { return read(question_of(kind, key), true); });
  if (found.ok()) return std::move(found).value();
  warn(Operation::read, found.error());
  return std::nullopt;
}

void Store::keep(EntryHeader header, std::string_view content) {
  if (config_.mode != Mode::rw) return;
  header.lawson = library_build();
  const Status kept = contained([&] { return write(header, content); });
  if (!kept.ok()) warn(Operation::write, kept.error());
}

void Store::reject(EntryKind kind, const std::string& key, std::string_view why) {
  warn(Operation::read, invalid("{}: {}", path_of(question_of(kind, key)), why));
}

Result<Plan> Store::find_plan(const std::string& key) const {
  LAWSON_CHECK(check_mode(Mode::ro));
  for (const bool deviceless : {false, true}) {
    LAWSON_TRY(std::optional<Plan> found, read_plan(key, deviceless, false));
    if (found) return std::move(*found);
  }
  return error(ErrorKind::unavailable, "{}: has no plan of key '{}'", config_.folder, key);
}

Status Store::add(const Plan& plan) {
  LAWSON_CHECK(check_mode(Mode::rw));
  return write(header_of(plan), text_of(plan_to_bytes(plan)));
}

Result<Usage> Store::usage() const {
  LAWSON_CHECK(check_mode(Mode::ro));
  LAWSON_TRY(const auto folder, StoreFolder::open(config_.folder));
  if (!folder) return Usage{};
  return measure_entries(*folder);
}

Result<std::vector<StoredEntry>> Store::list() const {
  LAWSON_CHECK(check_mode(Mode::ro));
  LAWSON_TRY(const auto folder, StoreFolder::open(config_.folder));
  if (!folder) return std::vector<StoredEntry>{};
  return list_entries(*folder);
}

Result<std::vector<StoredEntry>> Store::check(bool remove) const {
  LAWSON_CHECK(check_mode(remove ? Mode::rw : Mode::ro));
  LAWSON_TRY(const auto folder, StoreFolder::open(config_.folder));
  if (!folder) return std::vector<StoredEntry>{};
  return check_entries(*folder, remove);
}

Result<Pruned> Store::prune(const PruneRules& rules) const {
  LAWSON_CHECK(check_mode(Mode::rw));
  LAWSON_TRY(const auto folder, StoreFolder::open(config_.folder));
  if (!folder) return Pruned{};
  return prune_entries(*folder, rules);
}

std::string Store::path_of(const EntryHeader& header) const {
  return config_.folder + '/' + entry_name(header);
}

Result<std::optional<std::string>> Store::read(const EntryHeader& asked, bool use) const {
  const std::string name = entry_name(asked);
  LAWSON_TRY(const auto folder, StoreFolder::open(config_.folder));
  if (!folder) return std::optional<std::string>{};
  LAWSON_TRY(auto found,
             folder->read(name, kMaxHeadBytes + kMaxContentBytes, use && config_.mode == Mode::rw));
  if (!found) return std::optional<std::string>{};
  const auto entry = decode_entry(found->text);
  if (!entry.ok()) return invalid("{}: {}", path_of(asked), entry.error().message);
  const EntryHeader& header = entry->header;
  if (header.kind != asked.kind || header.key != asked.key || header.lawson != asked.lawson ||
      header.deviceless != asked.deviceless) {
    return invalid("{}: it answers another question", path_of(asked));
  }
  found->text.erase(0, found->text.size() - entry->content.size());
  return std::optional{std::move(found->text)};
}

Result<std::optional<Plan>> Store::read_plan(const std::string& key, bool deviceless,
                                             bool use) const {
  const EntryHeader asked = question_of(EntryKind::plan, key, deviceless);
  LAWSON_TRY(const auto content, read(asked, use));
  if (!content) return std::optional<Plan>{};
  auto plan = plan_of_content(asked, *content);
  if (!plan.ok()) return invalid("{}: {}", path_of(asked), plan.error().message);
  return std::optional{std::move(plan).value()};
}

Result<std::optional<Verdict>> Store::read_verdict(const std::string& key, bool deviceless,
                                                   bool use) const {
  const EntryHeader asked = question_of(EntryKind::verdict, key, deviceless);
  LAWSON_TRY(const auto content, read(asked, use));
  if (!content) return std::optional<Verdict>{};
  auto verdict = verdict_of_content(asked, *content);
  if (!verdict.ok()) return invalid("{}: {}", path_of(asked), verdict.error().message);
  return std::optional{std::move(verdict).value()};
}

Status Store::write(const EntryHeader& header, std::string_view content) {
  LAWSON_TRY(const std::string text, encode_entry(header, content));
  if (text.size() > config_.budget_bytes) return {};
  LAWSON_TRY(const StoreFolder folder, StoreFolder::create(config_.folder));
  LAWSON_CHECK(folder.write(entry_name(header), text));
  const std::uint64_t unsurveyed = unsurveyed_bytes_.fetch_add(text.size()) + text.size();
  if (unsurveyed < config_.budget_bytes / kSurveyShare) return {};
  unsurveyed_bytes_ = 0;
  return make_room(folder);
}

Status Store::make_room(const StoreFolder& folder) const {
  // Also of use within the budget: what killed writers left is cleared away.
  PruneRules rules;
  rules.budget_bytes = config_.budget_bytes;
  rules.max_bytes = config_.budget_bytes - config_.budget_bytes / kFreedShare;
  rules.spare_used = true;
  LAWSON_TRY(Pruned pruned, prune_entries(folder, rules));
  if (pruned.failure) return *std::move(pruned.failure);
  return {};
}

Status Store::check_mode(Mode needed) const {
  if (config_.mode >= needed) return {};
  if (config_.mode == Mode::off) {
    return error(ErrorKind::unavailable, "the store is off (LAWSON_CACHE=off, or no HOME)");
  }
  return error(ErrorKind::unavailable, "{}: the store is read-only (LAWSON_CACHE={})",
               config_.folder, to_string(config_.mode));
}

void Store::warn(Operation operation, const Error& error) {
  const Fault fault = error.kind == ErrorKind::unavailable ? Fault::not_trusted
                      : operation == Operation::write      ? Fault::not_written
                      : error.kind == ErrorKind::io || error.kind == ErrorKind::out_of_memory
                          ? Fault::not_read
                          : Fault::bad_entry;
  if (warned_.at(static_cast<std::size_t>(fault)).exchange(true)) return;
  constexpr std::array kWords{"a stored file is of no use", "what is stored cannot be trusted",
                              "what is stored cannot be read", "nothing can be stored"};
  static_cast<void>(contained([&]() -> Status {
    const std::string text = fmt::format("{} (further cases like it are not told): {}",
                                         kWords.at(static_cast<std::size_t>(fault)), error.message);
    if (config_.warn) {
      config_.warn(text);
    } else {
      std::fprintf(stderr, "lawson: warning: %s\n", text.c_str());
    }
    return {};
  }));
}

}  // namespace lawson::plan
