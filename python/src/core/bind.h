// lawson._core: the C++ API for Python. Calls that can take long run without the interpreter's
// lock; errors of the library become the exceptions of lawson._errors.
#ifndef LAWSON_PYTHON_CORE_BIND_H_
#define LAWSON_PYTHON_CORE_BIND_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <lawson/lawson.hpp>

#include <optional>
#include <string>
#include <string_view>

namespace lawson::python {

namespace nb = nanobind;
using namespace nb::literals;

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// Found by its name again where a name is asked for: "cuda:1" says more than the device's own name.
struct NamedDevice {
  explicit NamedDevice(const std::string& name) : asked{name}, device{Device::find(name)} {}

  std::string asked;
  Device device;
};

inline const Options& or_default(const Options* options) {
  static const Options kBuilt = [] {
    Options built;
    built.strength = LAWSON_BUILT;
    return built;
  }();
  return options == nullptr ? kBuilt : *options;
}

// Text that may hold bytes of a user's that are not UTF-8.
inline nb::str text(std::string_view bytes) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

void bind_errors(nb::module_& module);
void bind_process(nb::module_& module);
void bind_graphs(nb::module_& module);
void bind_verdicts(nb::module_& module);
void bind_plans(nb::module_& module);
void bind_attention(nb::module_& module);

}  // namespace lawson::python

#endif  // LAWSON_PYTHON_CORE_BIND_H_
