// Reading untrusted JSON documents: bounded size and depth, errors that name file and field.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/dims.h"
#include "base/status.h"

namespace lawson {

using Json = nlohmann::json;

inline constexpr std::size_t kMaxDocumentBytes = std::size_t{8} << 20;
inline constexpr int kMaxDocumentDepth = 64;

// Parses one document. `source` is the file's name (or a description) for messages.
Result<Json> parse_json(std::string_view text, const std::string& source);

// Control characters would cut names short at the C ABI (NUL) and reach terminals.
bool has_control(std::string_view text);

// CBOR that somebody else wrote: depth is bounded before anything recurses over it.
Result<Json> parse_cbor(std::string_view bytes);

// Reads a whole file of at most `limit` bytes, without reading more than that.
Result<std::string> read_file(const std::string& path, std::size_t limit = kMaxDocumentBytes);

// The nearest of `known` by edit distance, or "" when nothing is near.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// A JSON object read field by field. Every error names source, field, value and what was allowed;
// finish() refuses fields that nobody asked for and names the nearest known one.
class ObjectReader {
 public:
  // `path` is the field path of the object inside the document ("" for the top level).
  ObjectReader(const Json& object, std::string source, std::string path = "");

  bool has(const std::string& field);  // present and not null; counts as known
  const Json* find(const std::string& field);

  Result<std::int64_t> integer(const std::string& field, std::int64_t low, std::int64_t high);
  Result<std::int64_t> integer_or(const std::string& field, std::int64_t fallback, std::int64_t low,
                                  std::int64_t high);
  Result<double> number_or(const std::string& field, double fallback);  // finite
  Result<bool> boolean_or(const std::string& field, bool fallback);
  Result<std::string> string(const std::string& field);
  Result<std::string> string_or(const std::string& field, std::string fallback);
  Result<std::string> choice_or(const std::string& field, std::string fallback,
                                const std::vector<std::string>& allowed);
  Result<Dims> integers(const std::string& field, std::int64_t low, std::int64_t high);

  Status finish() const;

  // "file.json: field 'a.b': message"
  Error fail(const std::string& field, std::string_view message) const;
  Error fail_value(const std::string& field, const Json& value, std::string_view expected) const;
  const std::string& source() const { return source_; }
  std::string path_of(const std::string& field) const;

 private:
  const Json& object_;
  std::string source_;
  std::string path_;
  std::vector<std::string> known_;
};

}  // namespace lawson
