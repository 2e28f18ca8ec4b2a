// Outcome types used inside the library. No exception crosses a folder; the C ABI edge and the
// cudnn-frontend edge are the only places that catch.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace lawson {

// Mirrors lawson_status in lawson.h (append-only).
enum class ErrorKind {
  unsupported,       // an answer: the request is understood, and cannot be had
  invalid_argument,  // the caller's input is wrong
  unavailable,       // the environment lacks something (library, device, file of ours)
  out_of_memory,
  cuda,
  cudnn,
  io,
  cancelled,
  internal,
};

const char* to_string(ErrorKind kind);

// Why something is unsupported. `code` is a stable word (snake_case), `message` one sentence that
// names attribute, value and limit, `field` the spec field it is about (may be empty).
struct Reason {
  std::string code;
  std::string message;
  std::string field;

  bool operator==(const Reason&) const = default;
};

struct Error {
  ErrorKind kind = ErrorKind::internal;
  std::string message;
  std::vector<Reason> reasons;  // filled only for ErrorKind::unsupported
};

template <typename... Args>
[[nodiscard]] Error error(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  return Error{kind, fmt::format(format, std::forward<Args>(args)...), {}};
}

template <typename... Args>
[[nodiscard]] Error invalid(fmt::format_string<Args...> format, Args&&... args) {
  return error(ErrorKind::invalid_argument, format, std::forward<Args>(args)...);
}

[[nodiscard]] Error unsupported(std::string code, std::string message, std::string field = {});

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_{std::move(error)}, ok_{false} {}  // NOLINT(google-explicit-*)

  bool ok() const { return ok_; }
  explicit operator bool() const { return ok_; }
  const Error& error() const& { return error_; }
  Error&& error() && { return std::move(error_); }

 private:
  Error error_;
  bool ok_ = true;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_{std::in_place_index<0>, std::move(value)} {}      // NOLINT
  Result(Error error) : state_{std::in_place_index<1>, std::move(error)} {}  // NOLINT

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }

  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

 private:
  std::variant<T, Error> state_;
};

}  // namespace lawson

#define LAWSON_CONCAT_(a, b) a##b
#define LAWSON_CONCAT(a, b) LAWSON_CONCAT_(a, b)

// LAWSON_TRY(auto x, f()): x = value of f(), or return its error.
#define LAWSON_TRY(decl, expr) LAWSON_TRY_(LAWSON_CONCAT(result_, __LINE__), decl, expr)
#define LAWSON_TRY_(tmp, decl, expr)            \
  auto tmp = (expr);                            \
  if (!tmp.ok()) return std::move(tmp).error(); \
  decl = std::move(tmp).value()

// LAWSON_CHECK(f()): return the error of a Status or a Result whose value is not wanted.
#define LAWSON_CHECK(expr)                                \
  do {                                                    \
    auto status_ = (expr);                                \
    if (!status_.ok()) return std::move(status_).error(); \
  } while (false)
