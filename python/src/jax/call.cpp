#include "jax/call.h"

#include <array>
#include <utility>

namespace lawson::jax {
namespace {

constexpr std::array kDtypes{
    std::pair{ffi::F64, "f64"},
    std::pair{ffi::F32, "f32"},
    std::pair{ffi::F16, "f16"},
    std::pair{ffi::BF16, "bf16"},
    std::pair{ffi::F8E4M3FN, "f8e4m3"},
    std::pair{ffi::F8E5M2, "f8e5m2"},
    std::pair{ffi::F8E8M0FNU, "f8e8m0"},
    std::pair{ffi::F4E2M1FN, "f4e2m1"},
    std::pair{ffi::S64, "i64"},
    std::pair{ffi::S32, "i32"},
    std::pair{ffi::S8, "i8"},
    std::pair{ffi::U8, "u8"},
    std::pair{ffi::S4, "i4"},
    std::pair{ffi::PRED, "bool"},
};

template <typename T>
T required(const ffi::Dictionary& all, std::string_view name, const char* kind) {
  if (!all.contains(name)) refuse("attribute '" + std::string{name} + "' is missing");
  auto value = all.get<T>(name);
  if (!value) refuse("attribute '" + std::string{name} + "' is not " + kind);
  return *value;
}

ffi::AnyBuffer workspace_of(const ffi::RemainingRets& rets) {
  if (rets.empty()) refuse("there is no workspace; it is the last result, of dtype u8");
  const ffi::AnyBuffer workspace = **rets.get<ffi::AnyBuffer>(rets.size() - 1);
  if (workspace.element_type() != ffi::U8) {
    refuse("the last result is the workspace, of dtype u8; it is " + describe(workspace));
  }
  return workspace;
}

Options read_options(const ffi::Dictionary& all) {
  Options options;
  options.engine = required_text(all, "engine");
  options.strength = LAWSON_BUILT;
  if (!all.contains("options")) return options;
  const auto given = required<ffi::Dictionary>(all, "options", "a dictionary");
  for (auto it = given.begin(); it != given.end(); ++it) {
    const std::string_view name = *it;
    if (name == "workspace_limit") {
      options.workspace_limit = required<std::int64_t>(given, name, "an i64");
    } else if (name == "deterministic") {
      options.deterministic = required<bool>(given, name, "a bool");
    } else if (name == "dynamic_shapes") {
      options.dynamic_shapes = required<bool>(given, name, "a bool");
    } else if (name == "deadline_ms") {
      options.deadline_ms = required<double>(given, name, "an f64");
    } else if (name == "tuning") {
      const auto word = required<std::string_view>(given, name, "a string");
      if (word != "off" && word != "quick" && word != "exhaustive") {
        refuse("option 'tuning': '" + std::string{word} +
               "' is not allowed; expected off, quick or exhaustive");
      }
      options.tuning = word == "off"     ? LAWSON_TUNING_OFF
                       : word == "quick" ? LAWSON_TUNING_QUICK
                                         : LAWSON_TUNING_EXHAUSTIVE;
    } else {
      refuse("option '" + std::string{name} +
             "' is not known; expected workspace_limit, deterministic, dynamic_shapes, deadline_ms "
             "or tuning");
    }
  }
  return options;
}

}  // namespace

void refuse(const std::string& message) {
  throw Error(LAWSON_INVALID_ARGUMENT, message);
}

std::string required_text(const ffi::Dictionary& all, std::string_view name) {
  return std::string{required<std::string_view>(all, name, "a string")};
}

Buffers::Buffers(ffi::RemainingArgs args, ffi::RemainingRets rets)
    : args_{args}, rets_{rets}, workspace_{workspace_of(rets)} {}

Attributes::Attributes(const ffi::Dictionary& all)
    : plan_id{required_text(all, "plan_id")}, options{read_options(all)} {
  if (all.contains("plan")) {
    const auto bytes = required<ffi::Span<const std::uint8_t>>(all, "plan", "an array of u8");
    if (bytes.size() > 0) {
      plan = Plan::deserialize(std::as_bytes(std::span{bytes.begin(), bytes.size()}));
      check_id(plan->id());
    }
  }
  if (all.contains("values")) {
    const auto given = required<ffi::Dictionary>(all, "values", "a dictionary");
    for (auto it = given.begin(); it != given.end(); ++it) {
      values.emplace(*it, required<double>(given, *it, "an f64"));
    }
  }
}

void Attributes::keep_plan(const Device& device) const {
  if (plan) plan->keep(device, options);
}

void Attributes::check_id(std::string_view found) const {
  if (found == plan_id) return;
  refuse("this program was compiled with plan " + plan_id + ", and here the plan is " +
         std::string{found} +
         "; compile the program again on this machine, or export it with the plan in it");
}

bool same_dtype(ffi::DataType given, std::string_view dtype) {
  for (const auto& [type, name] : kDtypes) {
    if (name == dtype) return type == given;
  }
  return false;
}

std::string describe(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::string text{dtype};
  text += '[';
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  }
  return text + ']';
}

std::string describe(const ffi::AnyBuffer& buffer) {
  std::string dtype = "XLA's dtype " + std::to_string(static_cast<int>(buffer.element_type()));
  for (const auto& [type, name] : kDtypes) {
    if (type == buffer.element_type()) dtype = name;
  }
  const auto dims = buffer.dimensions();
  return describe(dtype, {dims.begin(), dims.size()});
}

}  // namespace lawson::jax
