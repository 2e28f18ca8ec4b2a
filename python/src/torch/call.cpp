#include "torch/bind.h"

#include <nanobind/stl/string.h>
#include <structmember.h>

#include <algorithm>
#include <new>

#include "torch/cache.h"
#include "torch/prepared.h"

namespace lawson::torch {
namespace {

// A lawson._torch.Prepared and what is in it.
struct Kept {
  nb::object object;
  Prepared* prepared = nullptr;
};

// What it holds is touched with the interpreter's lock alone.
struct CallObject {
  PyObject ob_base;
  vectorcallfunc vectorcall;
  PyObject* weak_references;
  PyObject* describe;
  Cache<Kept>* cache;
};

CallObject& call_of(PyObject* self) {
  return *reinterpret_cast<CallObject*>(self);
}

template <typename F>
PyObject* guarded(const F& function) noexcept {
  try {
    return function().release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

void read_operands(PyObject* const* objects, std::span<DLTensor> views, Key& key) {
  const Torch& torch = Torch::get();
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (objects[i] == Py_None) {
      views[i].ndim = -1;
      key.add_none();
      continue;
    }
    torch.read(objects[i], i, views[i]);
    if (views[i].ndim > LAWSON_MAX_RANK) {
      refuse("operand " + std::to_string(i) + " has " + std::to_string(views[i].ndim) +
             " dims; expected at most " + std::to_string(LAWSON_MAX_RANK));
    }
    key.add(views[i]);
  }
}

// The place of the first tensor.
Place place_of(const Operands& operands) {
  for (std::size_t i = 0; i < operands.views.size(); ++i) {
    if (!operands.is_none(i)) return lawson::torch::place_of(operands.views[i]);
  }
  refuse("every operand is None; expected a tensor");
}

// What is described may build, load and allocate, which a captured stream does not survive.
void refuse_capture(const Place& place) {
  if (place.is_cpu()) return;
  if (!is_capturing(Device::find(place.name()), Torch::get().current_stream(place))) return;
  refuse(
      "the stream is being captured, and operands of such device, dtypes, shapes, strides and "
      "alignment are new here: nothing is built or loaded during a capture; run it once before");
}

// Asks Python. Another thread may have been there meanwhile: then the first is kept.
// `views` are the operands'.
Kept describe(CallObject& call, const Operands& operands, std::span<DLTensor> views,
              const Key& key) {
  refuse_capture(place_of(operands));
  nb::object arguments = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(operands.views.size())));
  if (!arguments.is_valid()) nb::raise_python_error();
  for (std::size_t i = 0; i < operands.views.size(); ++i) {
    PyTuple_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i),
                     nb::borrow(operands.objects[i]).release().ptr());
  }
  const nb::object function = nb::borrow(call.describe);
  nb::object made = nb::steal(PyObject_CallOneArg(function.ptr(), arguments.ptr()));
  if (!made.is_valid()) nb::raise_python_error();
  if (!nb::isinstance<Prepared>(made)) {
    throw nb::type_error(("describe returned a " +
                          nb::cast<std::string>(nb::str(made.type().attr("__qualname__"))) +
                          "; expected a lawson._torch.Prepared")
                             .c_str());
  }
  // Python may have given the operands other memory.
  Key now;
  read_operands(operands.objects, views, now);
  if (!std::ranges::equal(now.words(), key.words())) {
    refuse("describe changed an operand's shape, strides, dtype or alignment");
  }
  if (const Kept* known = call.cache->find(key)) return *known;
  Kept kept{made, nb::cast<Prepared*>(made)};
  kept.prepared->bind(operands);
  const std::optional<Kept> gone = call.cache->put(key, kept);
  return kept;
}

PyObject* run(PyObject* self, PyObject* const* objects, std::size_t flagged_count,
              PyObject* keywords) noexcept {
  const auto count = static_cast<std::size_t>(PyVectorcall_NARGS(flagged_count));
  return guarded([&] {
    if (keywords != nullptr && PyTuple_GET_SIZE(keywords) != 0) {
      throw nb::type_error("a Call takes operands by position alone");
    }
    if (count > kMaxOperands) {
      refuse("there are " + std::to_string(count) + " operands; expected at most " +
             std::to_string(kMaxOperands));
    }
    std::array<DLTensor, kMaxOperands> views;
    const Operands operands{objects, {views.data(), count}};
    Key key;
    read_operands(objects, {views.data(), count}, key);
    const CurrentGpu current{place_of(operands)};
    CallObject& call = call_of(self);
    const Kept* const known = call.cache->find(key);
    // A reference of its own: while the lock is let go, others may push it out.
    const Kept kept =
        known != nullptr ? *known : describe(call, operands, {views.data(), count}, key);
    return kept.prepared->run(operands);
  });
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) noexcept {
  static std::array<const char*, 3> names{"describe", "capacity", nullptr};
  PyObject* function = nullptr;
  Py_ssize_t capacity = 1024;
  if (PyArg_ParseTupleAndKeywords(arguments, keywords, "O|n:Call", const_cast<char**>(names.data()),
                                  &function, &capacity) == 0) {
    return nullptr;
  }
  return guarded([&] {
    if (PyCallable_Check(function) == 0) {
      throw nb::type_error(
          ("describe is a " + std::string{Py_TYPE(function)->tp_name} + "; expected a callable")
              .c_str());
    }
    if (capacity < 1) {
      refuse("capacity: " + std::to_string(capacity) + " is not allowed; expected 1 or more");
    }
    Torch::connect();
    auto cache = std::make_unique<Cache<Kept>>(static_cast<std::size_t>(capacity));
    nb::object made = nb::steal(type->tp_alloc(type, 0));
    if (!made.is_valid()) nb::raise_python_error();
    CallObject& call = call_of(made.ptr());
    call.vectorcall = &run;
    call.describe = nb::borrow(function).release().ptr();
    call.cache = cache.release();
    return made;
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  CallObject& call = call_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(call.describe);
  int stopped = 0;
  if (call.cache != nullptr) {
    call.cache->for_each([&](const Kept& kept) {
      if (stopped == 0) stopped = visit(kept.object.ptr(), arg);
    });
  }
  return stopped;
}

int clear(PyObject* self) {
  CallObject& call = call_of(self);
  // Destroyed after the cache is empty: they may lead back here.
  if (call.cache != nullptr) const std::vector<Kept> gone = call.cache->take_all();
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  CallObject& call = call_of(self);
  if (call.weak_references != nullptr) PyObject_ClearWeakRefs(self);
  clear(self);
  Py_CLEAR(call.describe);
  delete call.cache;
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* prepared(PyObject* self, PyObject* /*unused*/) noexcept {
  return guarded([&] {
    nb::list all;
    call_of(self).cache->for_each([&](const Kept& kept) { all.append(kept.object); });
    return all;
  });
}

PyObject* forget(PyObject* self, PyObject* /*unused*/) noexcept {
  clear(self);
  return Py_NewRef(Py_None);
}

PyObject* capacity_of(PyObject* self, void* /*unused*/) {
  return PyLong_FromSize_t(call_of(self).cache->capacity());
}

PyMethodDef methods[] = {
    {"prepared", &prepared, METH_NOARGS,
     "prepared($self, /)\n--\n\nWhat is kept, the most recently used first."},
    {"clear", &forget, METH_NOARGS, "clear($self, /)\n--\n\nForgets what is kept."},
    {},
};
PyGetSetDef properties[] = {
    {"capacity", &capacity_of, nullptr, "How many are kept at most.", nullptr},
    {},
};
PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallObject, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CallObject, weak_references), READONLY, nullptr},
    {"describe", T_OBJECT_EX, offsetof(CallObject, describe), READONLY, nullptr},
    {},
};

constexpr const char* kDoc =
    "Call(describe, capacity=1024)\n--\n\n"
    "One operation for tensors of any shape: what runs is found by the operands' device, dtypes,\n"
    "shapes, strides and alignment, and is asked of `describe` (with the tuple of operands) where\n"
    "it is not kept. Called with tensors or None, it returns the tuple of outputs, which require\n"
    "no gradient.";

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>(kDoc)},
    {Py_tp_new, reinterpret_cast<void*>(&make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, nullptr},
};
PyType_Spec spec{"lawson._torch.Call", sizeof(CallObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

void bind_call(nb::module_& module) {
  const nb::object type = nb::steal(PyType_FromSpec(&spec));
  if (!type.is_valid()) nb::raise_python_error();
  module.attr("Call") = type;
}

}  // namespace lawson::torch
