#include "base/json.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <optional>
#include <system_error>
#include <unordered_set>

namespace lawson {
namespace {

bool is_control(char c) {
  return (static_cast<unsigned char>(c) < 0x20) || c == 0x7F;
}

// The value as it was written, cut so that a message stays one readable line.
std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// Names come from the document too, and may be anything.
std::string shortened(std::string_view name) {
  std::string text =
      name.size() <= 80 ? std::string{name} : fmt::format("{}...", name.substr(0, 77));
  for (char& c : text) {
    if (is_control(c)) c = '?';
  }
  return text;
}

// Counts brackets outside of strings. Up to a document's first syntax error this is its depth.
bool is_deeper_than(std::string_view text, int limit) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > limit) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

// Of two fields of one name the parser would keep the last without a word.
struct UniqueKeys {
  bool operator()(int, Json::parse_event_t event, const Json& value) {
    if (event == Json::parse_event_t::object_start) {
      objects.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      objects.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const auto& name = value.get_ref<const std::string&>();
      if (!objects.back().insert(name).second && !repeated) repeated = name;
    }
    return true;
  }

  std::vector<std::unordered_set<std::string>> objects;
  std::optional<std::string> repeated;
};

// Reads without building anything, and stops at the first level too deep.
class DepthCheck : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return ++depth_ <= kMaxDocumentDepth; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return ++depth_ <= kMaxDocumentDepth; }
  bool end_array() override { return leave(); }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    error_position_ = position;
    return false;
  }

  std::optional<std::size_t> error_position() const { return error_position_; }

 private:
  bool leave() {
    --depth_;
    return true;
  }

  int depth_ = 0;
  std::optional<std::size_t> error_position_;
};

}  // namespace

bool has_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(), is_control);
}

Result<Json> parse_json(std::string_view text, const std::string& source) {
  if (text.size() > kMaxDocumentBytes) {
    return invalid("{}: the document has {} bytes; at most {} are read", source, text.size(),
                   kMaxDocumentBytes);
  }
  if (is_deeper_than(text, kMaxDocumentDepth)) {
    return invalid("{}: nested deeper than {} levels", source, kMaxDocumentDepth);
  }
  try {
    UniqueKeys unique;
    Json document = Json::parse(text, std::ref(unique));
    if (unique.repeated) {
      return invalid("{}: field '{}': appears twice in one object", source,
                     shortened(*unique.repeated));
    }
    return document;
  } catch (const Json::exception& e) {
    // nlohmann's text starts with an id in brackets; what follows says line, column and cause.
    std::string_view what = e.what();
    if (const auto end = what.find("] "); end != std::string_view::npos)
      what.remove_prefix(end + 2);
    std::string printable;
    for (const char c : what) {
      printable += static_cast<unsigned char>(c) < 0x80 && (c >= ' ' || c == '\n') ? c : '?';
    }
    return invalid("{}: not a JSON document: {}", source, printable);
  }
}

Result<Json> parse_cbor(std::string_view bytes) {
  try {
    DepthCheck check;
    if (!Json::sax_parse(bytes.begin(), bytes.end(), &check, Json::input_format_t::cbor)) {
      if (const auto position = check.error_position()) {
        return error(ErrorKind::internal, "a message of {} bytes is not CBOR (at byte {})",
                     bytes.size(), *position);
      }
      return error(ErrorKind::internal, "a message is nested deeper than {} levels",
                   kMaxDocumentDepth);
    }
    return Json::from_cbor(bytes.begin(), bytes.end());
  } catch (const Json::exception& e) {
    return error(ErrorKind::internal, "a message could not be read: {}", e.what());
  }
}

Result<std::string> read_file(const std::string& path, std::size_t limit) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    return invalid("{}: cannot be opened ({})", path, std::generic_category().message(errno));
  }
  std::string text;
  std::string block(std::size_t{1} << 16, '\0');
  while (stream) {
    stream.read(block.data(), static_cast<std::streamsize>(block.size()));
    text.append(block, 0, static_cast<std::size_t>(stream.gcount()));
    if (text.size() > limit) {
      return invalid("{}: larger than {} bytes, the most that is read", path, limit);
    }
  }
  if (stream.bad()) return error(ErrorKind::io, "{}: reading failed", path);
  return text;
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 2) + 1;
  for (const std::string& candidate : known) {
    const std::size_t distance = edit_distance(name.substr(0, 64), candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

ObjectReader::ObjectReader(const Json& object, std::string source, std::string path)
    : object_{object}, source_{std::move(source)}, path_{std::move(path)} {}

std::string ObjectReader::path_of(const std::string& field) const {
  return path_.empty() ? field : path_ + "." + field;
}

Error ObjectReader::fail(const std::string& field, std::string_view message) const {
  return invalid("{}: field '{}': {}", source_, shortened(path_of(field)), message);
}

Error ObjectReader::fail_value(const std::string& field, const Json& value,
                               std::string_view expected) const {
  return fail(field, fmt::format("{} is not allowed; expected {}", shown(value), expected));
}

namespace {

// Names what is there, unread, under a name like the field's.
Error missing(const ObjectReader& reader, const Json& object, const std::vector<std::string>& read,
              const std::string& field, std::string_view expected) {
  std::vector<std::string> unread;
  if (object.is_object()) {
    for (const auto& [name, value] : object.items()) {
      const bool is_read = std::find(read.begin(), read.end(), name) != read.end();
      if (!is_read && name.size() <= 2 * field.size() && !has_control(name)) unread.push_back(name);
    }
  }
  const std::string near = nearest_name(field, unread);
  if (near.empty() || 2 * edit_distance(near, field) > field.size()) {
    return reader.fail(field, fmt::format("missing; expected {}", expected));
  }
  return reader.fail(field, fmt::format("missing, and there is '{}'; expected {}", near, expected));
}

}  // namespace

const Json* ObjectReader::find(const std::string& field) {
  known_.push_back(field);
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(field);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool ObjectReader::has(const std::string& field) {
  return find(field) != nullptr;
}

Result<std::int64_t> ObjectReader::integer(const std::string& field, std::int64_t low,
                                           std::int64_t high) {
  const Json* value = find(field);
  const std::string expected = fmt::format("an integer from {} to {}", low, high);
  if (value == nullptr) return missing(*this, object_, known_, field, expected);
  if (!value->is_number_integer()) return fail_value(field, *value, expected);
  if (value->is_number_unsigned() &&
      value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
    return fail_value(field, *value, expected);
  }
  const auto number = value->get<std::int64_t>();
  if (number < low || number > high) return fail_value(field, *value, expected);
  return number;
}

Result<std::int64_t> ObjectReader::integer_or(const std::string& field, std::int64_t fallback,
                                              std::int64_t low, std::int64_t high) {
  if (!has(field)) return fallback;
  return integer(field, low, high);
}

Result<double> ObjectReader::number_or(const std::string& field, double fallback) {
  const Json* value = find(field);
  if (value == nullptr) return fallback;
  if (!value->is_number() || !std::isfinite(value->get<double>())) {
    return fail_value(field, *value, "a finite number");
  }
  return value->get<double>();
}

Result<bool> ObjectReader::boolean_or(const std::string& field, bool fallback) {
  const Json* value = find(field);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return fail_value(field, *value, "true or false");
  return value->get<bool>();
}

Result<std::string> ObjectReader::string(const std::string& field) {
  const Json* value = find(field);
  if (value == nullptr) return missing(*this, object_, known_, field, "a string");
  if (!value->is_string()) return fail_value(field, *value, "a string");
  auto text = value->get<std::string>();
  if (has_control(text)) {
    return fail_value(field, *value, "a string without control characters");
  }
  return text;
}

Result<std::string> ObjectReader::string_or(const std::string& field, std::string fallback) {
  if (!has(field)) return fallback;
  return string(field);
}

Result<std::string> ObjectReader::choice_or(const std::string& field, std::string fallback,
                                            const std::vector<std::string>& allowed) {
  const Json* value = find(field);
  if (value == nullptr) return fallback;
  const std::string expected = fmt::format("one of {}", fmt::join(allowed, ", "));
  if (!value->is_string()) return fail_value(field, *value, expected);
  auto text = value->get<std::string>();
  if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
    const std::string near = nearest_name(text, allowed);
    return fail_value(field, *value,
                      near.empty() ? expected : fmt::format("{} (nearest: {})", expected, near));
  }
  return text;
}

Result<Dims> ObjectReader::integers(const std::string& field, std::int64_t low, std::int64_t high) {
  const Json* value = find(field);
  const std::string expected = fmt::format("a list of integers from {} to {}", low, high);
  if (value == nullptr) return missing(*this, object_, known_, field, expected);
  if (!value->is_array()) return fail_value(field, *value, expected);
  Dims result;
  for (std::size_t i = 0; i < value->size(); ++i) {
    const Json& item = (*value)[i];
    const bool fits = item.is_number_integer() &&
                      (!item.is_number_unsigned() ||
                       item.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX)) &&
                      item.get<std::int64_t>() >= low && item.get<std::int64_t>() <= high;
    if (!fits) return fail_value(fmt::format("{}[{}]", field, i), item, expected);
    result.push_back(item.get<std::int64_t>());
  }
  return result;
}

Status ObjectReader::finish() const {
  if (!object_.is_object()) {
    return invalid("{}: {}expected an object, got {}", source_,
                   path_.empty() ? "" : fmt::format("field '{}': ", path_), shown(object_));
  }
  for (const auto& [name, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    const std::string near = nearest_name(name, known_);
    return fail(name, near.empty() ? "unknown field"
                                   : fmt::format("unknown field; did you mean '{}'?", near));
  }
  return {};
}

}  // namespace lawson
