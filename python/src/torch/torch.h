// What is used of torch: nothing is compiled or linked against it. Tensors cross by the table that
// torch offers for DLPack's C exchange; outputs are made by torch itself, so that they are as any
// other tensor (Tensor.record_stream ignores memory that came through DLPack).
//
// All functions here need the interpreter's lock, and what they find lives as long as the process.
#ifndef LAWSON_PYTHON_TORCH_TORCH_H_
#define LAWSON_PYTHON_TORCH_TORCH_H_

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>
#include <lawson/lawson.hpp>

#include <span>
#include <string>
#include <string_view>

namespace lawson::torch {

namespace nb = nanobind;

[[noreturn]] void refuse(const std::string& message);

// For code that nanobind does not call: the exception that is being handled becomes Python's.
void find_error_classes();
void set_python_error() noexcept;

// Where tensors are.
struct Place {
  DLDeviceType type{};
  std::int32_t index = 0;

  bool is_cpu() const { return type == kDLCPU; }
  std::string name() const;
  bool operator==(const Place&) const = default;
};

inline Place place_of(const DLTensor& tensor) {
  // Pinned memory is the host's.
  if (tensor.device.device_type == kDLCUDAHost) return {kDLCPU, 0};
  return {tensor.device.device_type, tensor.device.device_id};
}

inline void* data_of(const DLTensor& tensor) {
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

// Whether a CUDA graph is being recorded on the stream; a GPU's.
bool is_capturing(const Device& device, void* stream);

class Torch {
 public:
  // Throws Error (LAWSON_UNAVAILABLE) where the installed torch has no table.
  static const Torch& connect();
  // After connect().
  static const Torch& get() { return *instance; }

  // A tensor of torch's, and of no subclass but a module's parameter.
  bool is_plain(PyObject* object) const {
    return Py_TYPE(object) == tensor_type_ || Py_TYPE(object) == parameter_type_;
  }
  // The address, place, dtype, shape and strides of an operand, borrowed from it. `position` is for
  // messages. Throws Error for what is no plain tensor in memory.
  void read(PyObject* operand, std::size_t position, DLTensor& view) const {
    if (!is_plain(operand)) refuse_type(operand, position);
    if (table_->dltensor_from_py_object_no_sync(operand, &view) != 0) refuse_memory(position);
    if (view.data == nullptr) check_empty(view, position);
    // A view of a complex tensor's conjugate; DLPack knows no such bit.
    if (view.dtype.code == kDLFloat && is_negated(operand)) refuse_negated(position);
  }

  // A tensor of torch's own making, on the host or on torch's current GPU. `arguments`: the tuple
  // (shape, strides, dtype).
  nb::object make(const Place& place, const nb::object& arguments) const {
    PyObject* const function = place.is_cpu() ? make_on_cpu_ : make_on_gpu_;
    if (function == nullptr) return empty_strided(place, arguments);
    PyObject* const made = PyObject_Call(function, arguments.ptr(), nullptr);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
  }
  // torch.empty_strided.
  nb::object empty_strided(const Place& place, const nb::object& arguments) const;
  // The address of a tensor that is known to be plain.
  void* address(const nb::object& tensor) const;
  nb::object dtype(std::string_view name) const;
  nb::object device(const Place& place) const;
  nb::object contiguous(PyObject* operand) const;
  // Tells autograd that the memory has changed.
  void increment_version(PyObject* tensor) const;
  // The stream on which torch would launch; null on the host.
  void* current_stream(const Place& place) const;

  const DLPackExchangeAPI& table() const { return *table_; }
  // Of the GPUs that torch sees: whether there is another one than this.
  bool has_other_gpu() const;
  int current_gpu() const;
  void set_current_gpu(int index) const;

 private:
  explicit Torch(nb::module_ torch);
  [[noreturn]] static void refuse_type(PyObject* operand, std::size_t position);
  [[noreturn]] static void refuse_memory(std::size_t position);
  static void check_empty(const DLTensor& view, std::size_t position);
  [[noreturn]] static void refuse_negated(std::size_t position);
  bool is_negated(PyObject* operand) const {
    PyObject* const answer = PyObject_Vectorcall(is_neg_, &operand, 1, nullptr);
    if (answer == nullptr) nb::raise_python_error();
    Py_DECREF(answer);  // one of two immortal objects
    return answer == Py_True;
  }

  static const Torch* instance;

  const DLPackExchangeAPI* table_ = nullptr;
  PyTypeObject* tensor_type_ = nullptr;
  PyTypeObject* parameter_type_ = nullptr;
  PyObject* is_neg_ = nullptr;
  // What the code of torch.compile's own backend calls for its outputs, at half the cost of
  // torch.empty_strided, which is for a torch without them.
  PyObject* make_on_cpu_ = nullptr;
  PyObject* make_on_gpu_ = nullptr;
  PyObject* increment_version_ = nullptr;
  PyObject* torch_ = nullptr;
  mutable int gpus_ = -1;  // not asked yet; with the interpreter's lock
};

// Makes the operands' GPU torch's current one, as the engine makes its context the current one of
// the thread, and then the one that it was again.
class CurrentGpu {
 public:
  explicit CurrentGpu(const Place& place);
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;
  ~CurrentGpu();

 private:
  int before_ = -1;  // nothing to be done
};

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_TORCH_H_
