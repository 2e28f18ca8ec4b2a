#include "diag/settings.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "base/lazy.h"
#include "diag/lines.h"

namespace lawson::diag {
namespace {

// Ours, and the name that users of other fused attention have in their scripts.
struct Name {
  const char* ours;
  const char* alias;
};
constexpr Name kCacheDebug{"LAWSON_CACHE_DEBUG", "NVTE_FUSED_ATTN_CACHE_DEBUG"};
constexpr Name kDebug{"LAWSON_DEBUG", "NVTE_DEBUG"};
constexpr Name kDebugLevel{"LAWSON_DEBUG_LEVEL", "NVTE_DEBUG_LEVEL"};
// Set by torchrun, by it and others per node, by Open MPI and by Slurm.
constexpr std::array kRanks{"RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"};

std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc{} || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

struct Given {
  const char* name = nullptr;
  std::string_view value;
};

// A variable that is set to nothing is not set.
std::optional<Given> given(const Variables& variables, const Name& name) {
  for (const char* candidate : {name.ours, name.alias}) {
    const char* value = variables(candidate);
    if (value != nullptr && *value != '\0') return Given{candidate, value};
  }
  return std::nullopt;
}

int rank_of(const Variables& variables) {
  for (const char* name : kRanks) {
    const char* value = variables(name);
    if (value == nullptr) continue;
    if (const auto rank = number(value)) return *rank;
  }
  return 0;
}

// `ranks`: "all", or numbers with commas between them. nullopt: neither.
std::optional<bool> names_rank(std::string_view ranks, int rank) {
  if (ranks == "all") return true;
  bool named = false;
  for (;;) {
    const std::size_t comma = ranks.find(',');
    const auto one = number(ranks.substr(0, comma));
    if (!one) return std::nullopt;
    named = named || *one == rank;
    if (comma == std::string_view::npos) return named;
    ranks.remove_prefix(comma + 1);
  }
}

class Reader {
 public:
  Reader(const Variables& variables, std::vector<std::string>& warnings)
      : variables_{variables}, warnings_{warnings} {}

  int level(const Name& name, int most, int fallback, std::string_view allowed) {
    const auto found = given(variables_, name);
    if (!found) return fallback;
    const auto value = number(found->value);
    if (value && *value <= most) return *value;
    warn(*found, allowed);
    return fallback;
  }

  int cache_level(int rank) {
    const auto found = given(variables_, kCacheDebug);
    if (!found) return 0;
    const std::size_t colon = found->value.find(':');
    const auto level = number(found->value.substr(0, colon));
    const auto named =
        names_rank(colon == std::string_view::npos ? "0" : found->value.substr(colon + 1), rank);
    if (level && *level <= 2 && named) return *named ? *level : 0;
    warn(*found,
         "LEVEL or LEVEL:RANKS, LEVEL 0 (nothing), 1 (a summary at exit) or 2 (also a line per "
         "event), RANKS 'all' or numbers as in '0,3,7' (without: 0)");
    return 0;
  }

 private:
  void warn(const Given& what, std::string_view allowed) {
    warnings_.push_back(
        fmt::format("{}='{}' is ignored; expected {}", what.name, printable(what.value), allowed));
  }

  const Variables& variables_;
  std::vector<std::string>& warnings_;
};

}  // namespace

Settings read_settings(const Variables& variables, std::vector<std::string>& warnings) {
  Reader reader{variables, warnings};
  Settings settings;
  settings.rank = rank_of(variables);
  settings.cache_level = reader.cache_level(settings.rank);
  const int on = reader.level(kDebug, 1, 0, "0 or 1");
  const int level =
      reader.level(kDebugLevel, 2, 1,
                   "0 (nothing), 1 (which engine was chosen) or 2 (also why the others were not)");
  settings.choice_level = on * level;
  return settings;
}

const Settings& settings() {
  static Lazy<const Settings> read;
  return read.get([] {
    std::vector<std::string> warnings;
    const Settings found =
        read_settings([](const char* name) { return std::getenv(name); }, warnings);
    for (const std::string& warning : warnings) print_line(warning);
    return found;
  });
}

std::vector<std::string> setting_names() {
  std::vector<std::string> names;
  for (const Name& name : {kCacheDebug, kDebug, kDebugLevel}) {
    names.emplace_back(name.ours);
    names.emplace_back(name.alias);
  }
  return names;
}

}  // namespace lawson::diag
