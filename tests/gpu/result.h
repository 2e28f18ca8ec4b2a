// A result document as a file that is read and compared by people too: a line per entry of a list.
#pragma once

#include <fstream>
#include <string>

#include "base/json.h"
#include "base/status.h"

namespace lawson::cases {

inline std::string lines(const Json& document) {
  const auto text = [](const Json& value) {
    return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  std::string result = "{";
  const char* comma = "\n";
  for (const auto& [key, value] : document.items()) {
    result += comma + text(key) + ": ";
    comma = ",\n";
    if (!value.is_array()) {
      result += text(value);
      continue;
    }
    const char* inner = "\n ";
    result += "[";
    for (const Json& item : value) {
      result += inner + text(item);
      inner = ",\n ";
    }
    result += "]";
  }
  return result + "\n}\n";
}

// Nothing where `path` is empty.
inline Status write_result(const std::string& path, const Json& document) {
  if (path.empty()) return {};
  std::ofstream file(path);
  file << lines(document);
  if (!file) return error(ErrorKind::io, "cannot write {}", path);
  return {};
}

}  // namespace lawson::cases
