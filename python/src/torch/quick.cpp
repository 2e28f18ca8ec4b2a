#include "torch/bind.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "torch/torch.h"

namespace lawson::torch {
namespace {

constexpr std::size_t kTensors = 3;
constexpr std::size_t kKept = 64;

// An answer of torch's, asked without arguments: a bool, a number or None.
class Question {
 public:
  Question() = default;
  explicit Question(nb::object function) : function_{function.release().ptr()} {}

  bool is_yes() const {
    const nb::object answer = nb::steal(PyObject_CallNoArgs(function_));
    if (!answer.is_valid()) nb::raise_python_error();
    const int found = PyObject_IsTrue(answer.ptr());
    if (found < 0) nb::raise_python_error();
    return found == 1;
  }

 private:
  PyObject* function_ = nullptr;  // lives as long as the process
};

// Of torch in this thread, asked anew each time.
class State {
 public:
  static const State& get() {
    if (instance == nullptr) instance = new State;
    return *instance;
  }

  // Whether modes of dispatch or of functions, functorch's transforms, torch.jit.trace or forward
  // mode look at calls, or transform them.
  bool is_watched() const {
    if (std::ranges::any_of(watching_, &Question::is_yes)) return true;
    const nb::object level = nb::steal(PyObject_GetAttr(forward_mode_, level_));
    if (!level.is_valid()) nb::raise_python_error();
    return PyLong_AsLong(level.ptr()) >= 0;  // -1 outside of it
  }

  bool is_autocast() const { return autocast_.is_yes(); }
  bool is_deterministic() const { return deterministic_.is_yes(); }

  bool is_recorded(std::span<PyObject* const> tensors) const {
    return grad_.is_yes() && std::ranges::any_of(tensors, [this](PyObject* tensor) {
             const nb::object answer = nb::steal(PyObject_GetAttr(tensor, requires_grad_));
             if (!answer.is_valid()) nb::raise_python_error();
             return answer.ptr() == Py_True;
           });
  }

 private:
  State() {
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object own = torch.attr("_C");
    std::size_t count = 0;
    for (const char* name : {"_len_torch_dispatch_stack", "_len_torch_function_stack",
                             "_are_functorch_transforms_active", "_is_tracing"}) {
      watching_[count++] = Question{own.attr(name)};
    }
    autocast_ = Question{own.attr("_is_any_autocast_enabled")};
    grad_ = Question{torch.attr("is_grad_enabled")};
    deterministic_ = Question{own.attr("_get_deterministic_algorithms")};
    forward_mode_ = nb::object{torch.attr("autograd").attr("forward_ad")}.release().ptr();
    level_ = PyUnicode_InternFromString("_current_level");
    requires_grad_ = PyUnicode_InternFromString("requires_grad");
  }

  static const State* instance;  // no guard: one would be waited for with the interpreter's lock

  std::array<Question, 4> watching_;
  Question autocast_;
  Question grad_;
  Question deterministic_;
  PyObject* forward_mode_ = nullptr;
  PyObject* level_ = nullptr;
  PyObject* requires_grad_ = nullptr;
};

const State* State::instance = nullptr;

// Whether the same object always means the same.
bool is_constant(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || PyTuple_CheckExact(object);
}

// What `find` gave for torch's setting and these arguments beside the tensors.
struct Kept {
  bool is_deterministic = false;
  std::vector<nb::object> arguments;
  nb::object form;
  nb::object run;
  bool is_single = false;

  bool is(bool deterministic, std::span<PyObject* const> given) const {
    return is_deterministic == deterministic &&
           std::ranges::equal(arguments, given, {}, [](const nb::object& x) { return x.ptr(); });
  }
};

// Used with the interpreter's lock alone.
class Quick {
 public:
  explicit Quick(nb::object find) : find_{std::move(find)} { Torch::connect(); }

  nb::object call(std::span<PyObject* const> arguments) {
    if (arguments.size() < kTensors) throw nb::type_error("expected three tensors and more");
    const auto tensors = arguments.first(kTensors);
    const Torch& torch = Torch::get();
    const bool is_plain =
        std::ranges::all_of(tensors, [&](PyObject* one) { return torch.is_plain(one); });
    if (!is_plain || state_.is_watched() || state_.is_autocast()) {
      return nb::borrow(Py_NotImplemented);
    }
    // Python runs from here on, and may come back here: by value.
    const auto [form, run, is_single] = found(arguments.subspan(kTensors));
    if (form.is_none()) return nb::borrow(Py_NotImplemented);
    if (state_.is_recorded(tensors)) return form;
    nb::object results =
        nb::steal(PyObject_Vectorcall(run.ptr(), tensors.data(), kTensors, nullptr));
    if (!results.is_valid()) nb::raise_python_error();
    return is_single ? nb::borrow(PyTuple_GET_ITEM(results.ptr(), 0)) : results;
  }

 private:
  struct Found {
    nb::object form;
    nb::object run;
    bool is_single = false;
  };

  Found found(std::span<PyObject* const> arguments) {
    const bool deterministic = state_.is_deterministic();
    const auto it = std::ranges::find_if(
        kept_, [&](const Kept& kept) { return kept.is(deterministic, arguments); });
    if (it != kept_.end()) return {it->form, it->run, it->is_single};
    return ask(deterministic, arguments);
  }

  Found ask(bool deterministic, std::span<PyObject* const> arguments) {
    std::vector<PyObject*> given{deterministic ? Py_True : Py_False};
    given.insert(given.end(), arguments.begin(), arguments.end());
    Found result;
    result.form = nb::steal(PyObject_Vectorcall(find_.ptr(), given.data(), given.size(), nullptr));
    if (!result.form.is_valid()) nb::raise_python_error();
    if (!result.form.is_none()) {
      result.run = result.form.attr("run");
      result.is_single = nb::cast<bool>(result.form.attr("is_single"));
    }
    if (!std::ranges::all_of(arguments, is_constant)) return result;
    Kept made{deterministic, {}, result.form, result.run, result.is_single};
    for (PyObject* one : arguments) made.arguments.push_back(nb::borrow(one));
    std::vector<Kept> gone;  // destroyed last: that may run Python, too
    if (kept_.size() >= kKept) gone.swap(kept_);
    kept_.push_back(std::move(made));
    return result;
  }

  nb::object find_;
  const State& state_ = State::get();
  std::vector<Kept> kept_;
};

constexpr const char* kName = "lawson._torch.quick";

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  try {
    auto* const quick = static_cast<Quick*>(PyCapsule_GetPointer(self, kName));
    if (quick == nullptr) nb::raise_python_error();
    return quick->call({arguments, static_cast<std::size_t>(count)}).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// A plain function of C: through nanobind the arguments would cost as much as all the rest.
PyMethodDef definition{"quick", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                       METH_FASTCALL, nullptr};

nb::object make(nb::object find) {
  // Lives as long as the process, as the function that has it.
  const nb::object capsule = nb::steal(PyCapsule_New(new Quick{std::move(find)}, kName, nullptr));
  if (!capsule.is_valid()) nb::raise_python_error();
  return nb::steal(PyCFunction_New(&definition, capsule.ptr()));
}

}  // namespace

void bind_quick(nb::module_& module) {
  module.def(
      "is_watched", [] { return State::get().is_watched(); },
      "Whether modes of dispatch or of functions, functorch's transforms, torch.jit.trace or\n"
      "forward mode look at calls, or transform them: then they go as operators.");
  module.def(
      "quick", &make, nb::arg("find"),
      "A function of (query, key, value, *static) for a module to keep. `find(*static)` gives\n"
      "what such calls run: with `run`, a Call, and `is_single`, whether its first result\n"
      "stands alone. The results; or what `find` gave, where autograd has to record the\n"
      "call; or NotImplemented, where tensors are no plain ones or a mode, a transform, a\n"
      "trace or autocast is active.");
}

}  // namespace lawson::torch
