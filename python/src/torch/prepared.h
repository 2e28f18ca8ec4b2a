// A loaded plan bound to descriptions of tensors. Made where a call meets shapes for the first
// time; afterwards a call only allocates, sets addresses and launches.
#ifndef LAWSON_PYTHON_TORCH_PREPARED_H_
#define LAWSON_PYTHON_TORCH_PREPARED_H_

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "torch/cache.h"
#include "torch/layout.h"
#include "torch/torch.h"

namespace lawson::torch {

// The operands of one call; where None was given the rank is -1.
struct Operands {
  PyObject* const* objects = nullptr;
  std::span<const DLTensor> views;

  bool is_none(std::size_t index) const { return views[index].ndim < 0; }
};

// What the plan reads.
struct Input {
  std::size_t operand = 0;
  TensorInfo tensor;
};

// What the plan writes: an operand in place, or a tensor that is made for it.
struct Output {
  TensorInfo tensor;
  std::optional<std::size_t> operand;
  Layout layout;
  nb::object arguments;  // of Torch::make
};

// The last argument of Prepared's constructors in Python: (shape, strides, dtype), or the index of
// an operand that is written in place.
Output read_output(nb::handle given, TensorInfo tensor, std::size_t index);

class Prepared {
 public:
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  virtual ~Prepared() = default;

  // Before the first run with operands of such a description; throws Error where the plan is not
  // for them.
  void bind(const Operands& operands);
  // The outputs, as a tuple. Asynchronous on torch's current stream on a GPU.
  nb::object run(const Operands& operands) const;

  const Plan& plan() const { return loaded_->plan(); }
  // lawson._core.Fusion: how the plan was chosen.
  nb::object loaded() const { return fusion_; }
  // "" before bind().
  std::string device() const { return place_ ? place_->name() : ""; }

 protected:
  // `fusion`: a lawson._core.Fusion. `copies`: operands whose contiguous copies are read.
  Prepared(nb::object fusion, std::vector<Input> inputs, std::vector<Output> outputs,
           std::vector<std::size_t> copies);

  // Addresses of inputs, then of outputs. Without the interpreter's lock on the host; several
  // threads at once.
  virtual void launch(std::span<void* const> addresses, void* workspace, std::size_t workspace_size,
                      void* stream) const = 0;
  // Whether the plan takes a tensor of this layout.
  virtual bool accepts(const Layout& given, const TensorInfo& wanted) = 0;
  virtual void check_place(const Place& place) const = 0;

  const std::vector<Input>& inputs() const { return inputs_; }
  const std::vector<Output>& outputs() const { return outputs_; }

 private:
  Place common_place(const Operands& operands) const;
  bool is_copied(std::size_t operand) const;
  void check_operand(const Operands& operands, std::size_t index, const TensorInfo& wanted);

  nb::object fusion_;
  const Fusion* loaded_ = nullptr;
  std::size_t workspace_size_ = 0;
  std::vector<Input> inputs_;
  std::vector<Output> outputs_;
  std::vector<std::size_t> copies_;
  bool writes_in_place_ = false;
  std::optional<Place> place_;
};

// Names say which attention params the operands are (lawson_attention_param in lower case; None: no
// operand of the plan).
std::unique_ptr<Prepared> prepare_attention(const std::string& spec, const std::string& pass,
                                            const std::vector<std::optional<std::string>>& names,
                                            const std::vector<std::string>& outs,
                                            const nb::sequence& results, const std::string& device,
                                            const Options* options,
                                            const std::map<std::string, double>& values,
                                            std::vector<std::size_t> copies);

// `operands` says which operand each input of the graph is, by-value ones left out.
std::unique_ptr<Prepared> prepare_fusion(nb::object fusion,
                                         const std::vector<std::size_t>& operands,
                                         const nb::sequence& results,
                                         const std::map<std::string, double>& values,
                                         std::vector<std::size_t> copies);

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_PREPARED_H_
