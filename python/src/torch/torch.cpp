#include "torch/torch.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>

namespace lawson::torch {
namespace {

constexpr const char* kLeast = "2.11";
constexpr const char* kCapsule = "dlpack_exchange_api";
// The name in DLPack's specification, and the one before it.
constexpr std::array kAttributes{"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"};

std::string text_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object));
}

// The newest table of the chain whose layout is the one that this was compiled with.
const DLPackExchangeAPI* find_table(nb::handle tensor_type, const std::string& version) {
  std::string found = "has none";
  for (const char* attribute : kAttributes) {
    if (!nb::hasattr(tensor_type, attribute)) continue;
    const nb::object capsule = tensor_type.attr(attribute);
    if (PyCapsule_IsValid(capsule.ptr(), kCapsule) == 0) {
      found = "has another kind of it";
      continue;
    }
    const auto* header =
        static_cast<const DLPackExchangeAPIHeader*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
    for (; header != nullptr; header = header->prev_api) {
      if (header->version.major != DLPACK_MAJOR_VERSION) {
        found = "has version " + std::to_string(header->version.major) + " of it";
        continue;
      }
      const auto* table = reinterpret_cast<const DLPackExchangeAPI*>(header);
      if (table->managed_tensor_allocator == nullptr ||
          table->dltensor_from_py_object_no_sync == nullptr ||
          table->current_work_stream == nullptr) {
        found = "has one that lacks functions";
        continue;
      }
      return table;
    }
  }
  throw Error(LAWSON_UNAVAILABLE, std::string{"lawson.torch needs DLPack's C exchange table, "} +
                                      "torch.Tensor." + kAttributes[0] + " of version " +
                                      std::to_string(DLPACK_MAJOR_VERSION) + ", and torch " +
                                      version + " " + found + "; install torch " + kLeast +
                                      " or newer");
}

// From a status to its exception; lives as long as the process.
PyObject* error_classes = nullptr;

}  // namespace

const Torch* Torch::instance = nullptr;

void find_error_classes() {
  nb::object found = nb::module_::import_("lawson._errors").attr("BY_STATUS");
  error_classes = found.release().ptr();
}

void refuse(const std::string& message) {
  throw Error(LAWSON_INVALID_ARGUMENT, message);
}

std::string Place::name() const {
  if (is_cpu()) return "cpu";
  if (type == kDLCUDA) return "cuda:" + std::to_string(index);
  return "DLPack's device type " + std::to_string(static_cast<int>(type));
}

bool is_capturing(const Device& device, void* stream) {
  int found = 0;
  detail::check(lawson_device_capturing(device.handle(), stream, &found));
  return found != 0;
}

const Torch& Torch::connect() {
  if (instance == nullptr) instance = new Torch{nb::module_::import_("torch")};
  return *instance;
}

Torch::Torch(nb::module_ torch) {
  const nb::object tensor_type = torch.attr("Tensor");
  table_ = find_table(tensor_type, text_of(torch.attr("__version__")));
  tensor_type_ = reinterpret_cast<PyTypeObject*>(nb::object{tensor_type}.release().ptr());
  parameter_type_ = reinterpret_cast<PyTypeObject*>(
      nb::object{torch.attr("nn").attr("Parameter")}.release().ptr());
  is_neg_ = nb::object{tensor_type.attr("is_neg")}.release().ptr();
  const nb::object makers =
      nb::getattr(nb::getattr(torch.attr("_C"), "_dynamo", nb::none()), "guards", nb::none());
  make_on_cpu_ = nb::getattr(makers, "_empty_strided_cpu", nb::object{}).release().ptr();
  make_on_gpu_ = nb::getattr(makers, "_empty_strided_cuda", nb::object{}).release().ptr();
  increment_version_ =
      nb::object{torch.attr("autograd").attr("graph").attr("increment_version")}.release().ptr();
  torch_ = torch.release().ptr();
}

void Torch::refuse_type(PyObject* operand, std::size_t position) {
  refuse("operand " + std::to_string(position) + " is of type " +
         text_of(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(operand))).attr("__qualname__")) +
         "; expected a torch.Tensor, no subclass but torch.nn.Parameter, or None");
}

// torch's message goes on with a stack trace.
void Torch::refuse_memory(std::size_t position) {
  nb::python_error raised;
  std::string said = text_of(raised.value());
  refuse("operand " + std::to_string(position) + " has no memory that torch hands out (" +
         said.substr(0, said.find('\n')) +
         "); expected a strided tensor outside torch.func's transforms");
}

// Without an address there are no elements, or torch took the memory away, or has not made it.
void Torch::check_empty(const DLTensor& view, std::size_t position) {
  const std::span<const std::int64_t> shape{view.shape, static_cast<std::size_t>(view.ndim)};
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  refuse("operand " + std::to_string(position) +
         " has elements and no memory: its storage was resized, or it stands for zeros");
}

void Torch::refuse_negated(std::size_t position) {
  refuse("operand " + std::to_string(position) +
         " is a lazily negated view; expected one in memory: Tensor.resolve_neg()");
}

nb::object Torch::empty_strided(const Place& place, const nb::object& arguments) const {
  return nb::handle(torch_).attr("empty_strided")(arguments[0], arguments[1],
                                                  nb::arg("dtype") = arguments[2],
                                                  nb::arg("device") = device(place));
}

void* Torch::address(const nb::object& tensor) const {
  DLTensor view;
  if (table_->dltensor_from_py_object_no_sync(tensor.ptr(), &view) != 0) nb::raise_python_error();
  return data_of(view);
}

nb::object Torch::dtype(std::string_view name) const {
  return nb::handle(torch_).attr(std::string{name}.c_str());
}

nb::object Torch::device(const Place& place) const {
  return nb::handle(torch_).attr("device")(place.name());
}

nb::object Torch::contiguous(PyObject* operand) const {
  const nb::object memory_format = nb::handle(torch_).attr("contiguous_format");
  return nb::handle(operand).attr("detach")().attr("clone")(nb::arg("memory_format") =
                                                                memory_format);
}

void Torch::increment_version(PyObject* tensor) const {
  if (!nb::steal(PyObject_CallOneArg(increment_version_, tensor)).is_valid()) {
    nb::raise_python_error();
  }
}

void* Torch::current_stream(const Place& place) const {
  if (place.is_cpu()) return nullptr;
  void* stream = nullptr;
  if (table_->current_work_stream(place.type, place.index, &stream) != 0) nb::raise_python_error();
  return stream;
}

bool Torch::has_other_gpu() const {
  // No guarded static: torch lets go of the interpreter's lock, and who then waited for the guard
  // would hold it.
  if (gpus_ < 0) gpus_ = nb::cast<int>(nb::handle(torch_).attr("cuda").attr("device_count")());
  return gpus_ > 1;
}

int Torch::current_gpu() const {
  return nb::cast<int>(nb::handle(torch_).attr("cuda").attr("current_device")());
}

void Torch::set_current_gpu(int index) const {
  nb::handle(torch_).attr("cuda").attr("set_device")(index);
}

CurrentGpu::CurrentGpu(const Place& place) {
  if (place.type != kDLCUDA || !Torch::get().has_other_gpu()) return;
  const int current = Torch::get().current_gpu();
  if (current == place.index) return;
  Torch::get().set_current_gpu(place.index);
  before_ = current;
}

CurrentGpu::~CurrentGpu() {
  if (before_ < 0) return;
  // What is being thrown is kept as C++'s exception, not as Python's.
  try {
    Torch::get().set_current_gpu(before_);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("lawson._torch.Call");
  }
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const Error& error) {
    // Text that may hold bytes of a user's that are not UTF-8.
    const std::string_view said = error.what();
    const nb::object text = nb::steal(
        PyUnicode_DecodeUTF8(said.data(), static_cast<Py_ssize_t>(said.size()), "replace"));
    const nb::object status = nb::steal(PyLong_FromLong(error.status()));
    PyObject* const type = PyDict_GetItem(error_classes, status.ptr());
    PyErr_SetObject(type == nullptr ? PyExc_RuntimeError : type, text.ptr());
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(
        error.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError,
        error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace lawson::torch
