#include "front/model_config.h"

#include <utility>

#include "base/lazy.h"

namespace lawson::front {

ModelConfig::ModelConfig(const Json& object, const std::string& source, const std::string& path)
    : object_{object}, source_{source}, path_{path}, reader_{object, source, path} {}

std::string ModelConfig::field(const Names& names) const {
  for (const std::string& name : names) {
    if (has({name})) return name;
  }
  return names.front();
}

std::string ModelConfig::path_of(const std::string& field) const {
  return path_.empty() ? field : path_ + "." + field;
}

bool ModelConfig::has(const Names& names) const {
  for (const std::string& name : names) {
    const auto it = object_.find(name);
    if (it != object_.end() && !it->is_null()) return true;
  }
  return false;
}

bool ModelConfig::is_null(const Names& names) const {
  if (has(names)) return false;
  for (const std::string& name : names) {
    if (object_.contains(name)) return true;
  }
  return false;
}

bool ModelConfig::is_list(const Names& names) const {
  return has(names) && object_.at(field(names)).is_array();
}

template <typename T>
T ModelConfig::keep(Result<T> result, T harmless) {
  if (result.ok()) return std::move(result).value();
  if (!error_) error_ = std::move(result).error();
  return harmless;
}

std::int64_t ModelConfig::size(const Names& names) {
  return keep<std::int64_t>(reader_.integer(field(names), 1, kMaxSize), 1);
}

std::int64_t ModelConfig::size_or(const Names& names, std::int64_t fallback) {
  return has(names) ? size(names) : fallback;
}

std::int64_t ModelConfig::count_or(const Names& names, std::int64_t fallback) {
  return keep<std::int64_t>(reader_.integer_or(field(names), fallback, 0, kMaxSize), 1);
}

std::int64_t ModelConfig::family_size(const Names& names, std::int64_t fallback) {
  if (has(names)) return size(names);
  defaults_.push_back(fmt::format("{} = {}", path_of(names.front()), fallback));
  return fallback;
}

bool ModelConfig::nested_default(const Names& names, std::int64_t fallback) {
  if (has(names) || path_.empty() || fallback == 0) return false;
  family_size(names, fallback);
  return true;
}

std::int64_t ModelConfig::layer_count(const Names& names) {
  return keep<std::int64_t>(reader_.integer(field(names), 1, kMaxLayers), 1);
}

std::optional<double> ModelConfig::positive(const Names& names, std::optional<double> fallback) {
  if (!has(names)) return is_null(names) ? std::nullopt : fallback;
  const std::string name = field(names);
  const double value = keep<double>(reader_.number_or(name, 1.0), 1.0);
  if (value <= 0.0) fail({name}, object_.at(name), "a number above 0, or null");
  return value;
}

double ModelConfig::number_or(const Names& names, double fallback) {
  return keep<double>(reader_.number_or(field(names), fallback), fallback);
}

bool ModelConfig::flag_or(const Names& names, bool fallback) {
  return keep<bool>(reader_.boolean_or(field(names), fallback), fallback);
}

std::string ModelConfig::word_or(const Names& names, const std::string& fallback) {
  return keep<std::string>(reader_.string_or(field(names), fallback), fallback);
}

std::vector<std::int64_t> ModelConfig::counts(const Names& names) {
  if (!has(names)) return {};
  return keep<std::vector<std::int64_t>>(reader_.integers(field(names), 0, kMaxSize), {});
}

std::vector<std::string> ModelConfig::words(const Names& names) {
  if (!has(names)) return {};
  const std::string name = field(names);
  const Json& list = object_.at(name);
  if (!list.is_array()) {
    fail({name}, list, "a list of strings");
    return {};
  }
  std::vector<std::string> result;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string()) {
      fail({fmt::format("{}[{}]", name, i)}, list[i], "a string");
      return {};
    }
    result.push_back(list[i].get<std::string>());
  }
  return result;
}

ModelConfig ModelConfig::nested(const std::string& name) {
  static Lazy<const Json> nothing;
  const Json& empty = nothing.get([] { return Json::object(); });
  const Json* value = &empty;
  if (has({name})) value = &object_.at(name);
  if (!value->is_object()) {
    fail({name}, *value, "an object");
    value = &empty;
  }
  return ModelConfig{*value, source_, path_of(name)};
}

void ModelConfig::absorb(const ModelConfig& inner) {
  if (!error_) error_ = inner.error_;
  warnings_.insert(warnings_.end(), inner.warnings_.begin(), inner.warnings_.end());
  defaults_.insert(defaults_.end(), inner.defaults_.begin(), inner.defaults_.end());
}

bool ModelConfig::require(bool holds, const Names& names, std::int64_t value,
                          const std::string& expected) {
  if (!holds) fail({field(names)}, Json(value), expected);
  return holds;
}

std::int64_t ModelConfig::product(const Names& names, std::int64_t a, std::int64_t b) {
  const bool fits = a <= kMaxSize / b;  // both are at least 1
  require(fits, names, a, fmt::format("at most {} (times {} it passes 2^31-1)", kMaxSize / b, b));
  return fits ? a * b : 1;
}

void ModelConfig::fail(const Names& names, const Json& value, const std::string& expected) {
  if (!error_) error_ = reader_.fail_value(names.front(), value, expected);
}

void ModelConfig::warn(std::string text) {
  warnings_.push_back(std::move(text));
}

std::vector<std::string> ModelConfig::warnings() const {
  std::vector<std::string> result = warnings_;
  if (!defaults_.empty()) {
    result.push_back(fmt::format("the family's defaults were taken for missing fields: {}",
                                 fmt::join(defaults_, ", ")));
  }
  return result;
}

}  // namespace lawson::front
