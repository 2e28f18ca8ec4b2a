// What the environment asks to be told (docs/diagnostics.md). Read once per process.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lawson::diag {

struct Settings {
  int rank = 0;          // of this process among those of one job
  int cache_level = 0;   // LAWSON_CACHE_DEBUG, 0 where this rank is not named
  int choice_level = 0;  // LAWSON_DEBUG and LAWSON_DEBUG_LEVEL
};

using Variables = std::function<const char*(const char* name)>;
// A value that is not allowed counts as not given, and is said in `warnings`.
Settings read_settings(const Variables& variables, std::vector<std::string>& warnings);

// Of this process. The first call prints the warnings.
const Settings& settings();

// Does what they ask for, unless the first event did: so that warnings and the summary at exit come
// also where nothing happens.
void begin() noexcept;

// The names of all variables that are read here, for reports.
std::vector<std::string> setting_names();

}  // namespace lawson::diag
