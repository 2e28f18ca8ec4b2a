// What one custom call of a compiled XLA program runs. Made at instantiation, where there is no
// device; then loaded on each device that the program runs on, and executed there, by several
// threads at once.
#ifndef LAWSON_PYTHON_JAX_CALL_H_
#define LAWSON_PYTHON_JAX_CALL_H_

#include <xla/ffi/api/ffi.h>
#include <lawson/lawson.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>

namespace lawson::jax {

namespace ffi = xla::ffi;

// Where an execution runs. All CPU devices of a client are the one host.
struct Place {
  bool is_cuda = false;
  int ordinal = 0;

  std::string name() const { return is_cuda ? "cuda:" + std::to_string(ordinal) : "cpu"; }
};

// Operands and results of one execution, the workspace left out.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs args, ffi::RemainingRets rets);

  std::size_t operand_count() const { return args_.size(); }
  std::size_t result_count() const { return rets_.size() - 1; }
  ffi::AnyBuffer operand(std::size_t index) const { return *args_.get<ffi::AnyBuffer>(index); }
  ffi::AnyBuffer result(std::size_t index) const { return **rets_.get<ffi::AnyBuffer>(index); }
  void* workspace() const { return workspace_.untyped_data(); }
  std::size_t workspace_size() const { return workspace_.size_bytes(); }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::AnyBuffer workspace_;
};

// Its functions throw lawson::Error.
class Call {
 public:
  virtual ~Call() = default;
  virtual void initialize(const Place& place) = 0;
  virtual void execute(const Place& place, const Buffers& buffers, void* stream) = 0;
};

std::unique_ptr<Call> make_plan_call(const ffi::Dictionary& attributes);
std::unique_ptr<Call> make_forward_call(const ffi::Dictionary& attributes);
std::unique_ptr<Call> make_backward_call(const ffi::Dictionary& attributes);

// Attributes that all calls have.
struct Attributes {
  explicit Attributes(const ffi::Dictionary& all);

  std::string plan_id;
  Options options;  // with the engine
  std::optional<Plan> plan;
  std::map<std::string, double, std::less<>> values;  // run-time scalars

  // The plan that the program carries becomes one of the process, for who asks for its graph.
  void keep_plan(const Device& device) const;
  // Anything else than the plan that the program was made with is an error.
  void check_id(std::string_view found) const;
};

std::string required_text(const ffi::Dictionary& all, std::string_view name);

// dtype, dims and bytes of a buffer against a tensor of the graph.
bool same_dtype(ffi::DataType given, std::string_view dtype);
std::string describe(const ffi::AnyBuffer& buffer);
std::string describe(std::string_view dtype, std::span<const std::int64_t> shape);
[[noreturn]] void refuse(const std::string& message);

// What was made for each device, once. What is found stays where it is.
template <typename T>
class PerPlace {
 public:
  T* find(const Place& place) {
    const std::shared_lock lock{mutex_};
    const auto it = made_.find(place.ordinal);
    return it == made_.end() ? nullptr : it->second.get();
  }

  template <typename Make>
  T& get(const Place& place, const Make& make) {
    if (T* known = find(place)) return *known;
    const std::lock_guard making{making_};
    if (T* known = find(place)) return *known;
    std::unique_ptr<T> made = make();
    const std::lock_guard lock{mutex_};
    return *(made_[place.ordinal] = std::move(made));
  }

 private:
  std::mutex making_;
  std::shared_mutex mutex_;
  std::map<int, std::unique_ptr<T>> made_;
};

}  // namespace lawson::jax

#endif  // LAWSON_PYTHON_JAX_CALL_H_
