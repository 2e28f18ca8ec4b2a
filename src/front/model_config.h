// Reading a config.json: fields that families spell differently, defaults, and one sticky error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace lawson::front {

using Names = std::vector<std::string>;

inline constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kMaxLayers = 10'000;

// The first error is kept and every later read returns a harmless value, so that a derivation
// reads top to bottom and asks ok() once at its end. Null counts as missing, except in
// is_null(), because transformers gives "absent" the family's default and null a derived value.
class ModelConfig {
 public:
  ModelConfig(const Json& object, const std::string& source, const std::string& path);

  bool has(const Names& names) const;      // present and not null
  bool is_null(const Names& names) const;  // present, and null
  bool is_list(const Names& names) const;

  std::int64_t size(const Names& names);  // 1..2^31-1, required
  std::int64_t size_or(const Names& names, std::int64_t fallback);
  std::int64_t count_or(const Names& names, std::int64_t fallback);  // 0..2^31-1
  // 1..2^31-1; a missing field takes the family's default, which is worth a warning.
  std::int64_t family_size(const Names& names, std::int64_t fallback);
  // Whether a field absent from a nested config takes `fallback` (0: none), with that warning.
  bool nested_default(const Names& names, std::int64_t fallback);
  std::int64_t layer_count(const Names& names);
  std::optional<double> positive(const Names& names, std::optional<double> fallback = {});
  double number_or(const Names& names, double fallback);
  bool flag_or(const Names& names, bool fallback);
  std::string word_or(const Names& names, const std::string& fallback);
  std::vector<std::int64_t> counts(const Names& names);
  std::vector<std::string> words(const Names& names);
  // The nested object of this name (empty when it is missing); hand it back with absorb().
  ModelConfig nested(const std::string& name);
  void absorb(const ModelConfig& inner);  // its error and its warnings

  // An error unless `holds`; `expected` completes "VALUE is not allowed; expected ...".
  bool require(bool holds, const Names& names, std::int64_t value, const std::string& expected);
  std::int64_t product(const Names& names, std::int64_t a, std::int64_t b);  // a*b <= 2^31-1
  void fail(const Names& names, const Json& value, const std::string& expected);
  void warn(std::string text);

  bool ok() const { return !error_; }
  Error error() const { return *error_; }
  std::vector<std::string> warnings() const;  // the last one lists the family defaults taken

 private:
  std::string path_of(const std::string& field) const;
  std::string field(const Names& names) const;  // the name that is present, else the first
  template <typename T>
  T keep(Result<T> result, T harmless);

  const Json& object_;
  std::string source_;
  std::string path_;
  ObjectReader reader_;
  std::optional<Error> error_;
  std::vector<std::string> warnings_;
  std::vector<std::string> defaults_;  // "num_attention_heads = 8"
};

}  // namespace lawson::front
