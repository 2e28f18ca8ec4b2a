// lawson::Error to the exception class of its status.
#include "core/bind.h"

namespace lawson::python {
namespace {

void translate(const std::exception_ptr& thrown, void* classes) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const nb::handle by_status{static_cast<PyObject*>(classes)};
    const nb::object type = by_status[nb::int_(static_cast<int>(error.status()))];
    PyErr_SetObject(type.ptr(), text(error.what()).ptr());
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  // Lives as long as the process, as the translator does.
  nb::object classes = nb::module_::import_("lawson._errors").attr("BY_STATUS");
  module.attr("_error_classes") = classes;
  nb::register_exception_translator(&translate, classes.release().ptr());
}

}  // namespace lawson::python
