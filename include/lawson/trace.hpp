// Tracing: lawson::Tensor and the ops on it. A function of tensors is run once with these, and what
// it does is recorded as a graph; when it is run again for the same inputs, each op is compared
// with the recorded one and nothing else happens. Part of lawson.hpp; see fusion.hpp for fuse().
//
// Ops check shapes and dtypes where they are called: lawson::Error (LAWSON_INVALID_ARGUMENT) names
// the file and line of the call, the op and its operands. Shapes broadcast as NumPy's do. A number
// beside a tensor is a constant of the tensor's dtype (of f32 where that cannot hold it).
#ifndef LAWSON_TRACE_HPP_
#define LAWSON_TRACE_HPP_

#include <lawson/lawson.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace lawson {

inline namespace dtypes {
inline constexpr lawson_dtype f64 = LAWSON_DTYPE_F64;
inline constexpr lawson_dtype f32 = LAWSON_DTYPE_F32;
inline constexpr lawson_dtype f16 = LAWSON_DTYPE_F16;
inline constexpr lawson_dtype bf16 = LAWSON_DTYPE_BF16;
inline constexpr lawson_dtype f8e4m3 = LAWSON_DTYPE_F8E4M3;
inline constexpr lawson_dtype f8e5m2 = LAWSON_DTYPE_F8E5M2;
inline constexpr lawson_dtype f8e8m0 = LAWSON_DTYPE_F8E8M0;
inline constexpr lawson_dtype f4e2m1 = LAWSON_DTYPE_F4E2M1;
inline constexpr lawson_dtype i64 = LAWSON_DTYPE_I64;
inline constexpr lawson_dtype i32 = LAWSON_DTYPE_I32;
inline constexpr lawson_dtype i8 = LAWSON_DTYPE_I8;
inline constexpr lawson_dtype u8 = LAWSON_DTYPE_U8;
inline constexpr lawson_dtype i4 = LAWSON_DTYPE_I4;
inline constexpr lawson_dtype boolean = LAWSON_DTYPE_BOOL;
}  // namespace dtypes

// Up to 8 integers: a shape, axes, a permutation. Negative axes count from the end.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::int64_t> list) : Dims{std::span{list.begin(), list.size()}} {}
  Dims(const std::vector<std::int64_t>& list) : Dims{std::span<const std::int64_t>{list}} {}
  Dims(std::span<const std::int64_t> list) : size_{list.size()} {
    if (size_ > values_.size()) {
      throw Error(LAWSON_INVALID_ARGUMENT, "a list of " + std::to_string(size_) +
                                               " dims; at most " + std::to_string(LAWSON_MAX_RANK));
    }
    std::copy(list.begin(), list.end(), values_.begin());
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const std::int64_t* data() const { return values_.data(); }
  std::int64_t* begin() { return values_.data(); }
  std::int64_t* end() { return values_.data() + size_; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  std::int64_t operator[](std::size_t i) const { return values_[i]; }
  bool operator==(const Dims& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::array<std::int64_t, LAWSON_MAX_RANK> values_{};
  std::size_t size_ = 0;
};

namespace detail {
class Tracer;
class Record;
inline constexpr double kExactIntegers = 0x1p53;  // less than this a double holds every one
}  // namespace detail

// A value inside a traced function; meaningless outside of it.
class Tensor {
 public:
  Tensor() = default;  // none: an optional operand that is absent

  lawson_dtype dtype() const;
  Dims shape() const;
  std::size_t rank() const { return shape().size(); }
  std::int64_t dim(std::int64_t axis) const;

 private:
  friend class detail::Tracer;
  Tensor(std::uint64_t trace, std::int32_t index) : trace_{trace}, index_{index} {}

  std::uint64_t trace_ = 0;  // 0: none
  std::int32_t index_ = -1;  // in the record
};

// A tensor or a number, and where it was written: what the ops take.
class Operand {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `x * 2` is the point.
  Operand(Tensor tensor, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : tensor_{tensor}, file_{file}, line_{line} {}
  template <typename T>
  requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>)
      Operand(T number, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : number_{static_cast<double>(number)}, is_number_{true}, file_{file}, line_{line} {
    if constexpr (std::is_integral_v<T>) {
      if (std::fabs(number_) < detail::kExactIntegers) return;
      throw Error(LAWSON_INVALID_ARGUMENT,
                  std::to_string(number) + ": an integer beside a tensor is less than 2^53");
    }
  }
  // NOLINTEND(google-explicit-constructor)

 private:
  friend class detail::Tracer;
  Tensor tensor_;
  double number_ = 0;
  bool is_number_ = false;
  const char* file_;
  int line_;
};

namespace detail {

struct Place {
  const char* file = "";
  int line = 0;

  // "mlp.cpp:12"
  std::string text() const {
    const char* slash = std::strrchr(file, '/');
    return std::string{slash == nullptr ? file : slash + 1} + ":" + std::to_string(line);
  }
};

inline constexpr std::array<std::string_view, 15> kDTypeNames{
    "unset",  "f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "f8e8m0",
    "f4e2m1", "i64", "i32", "i8",  "u8",   "i4",     "bool"};

inline lawson_dtype dtype_named(std::string_view name) {
  const auto* found = std::find(kDTypeNames.begin(), kDTypeNames.end(), name);
  return static_cast<lawson_dtype>(found == kDTypeNames.end() ? 0 : found - kDTypeNames.begin());
}
inline std::string_view dtype_name(lawson_dtype dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  return index < kDTypeNames.size() ? kDTypeNames[index] : "unknown";
}

// "bf16[64, 128]"
inline std::string text_of_tensor(lawson_dtype dtype, const Dims& shape) {
  std::string text{dtype_name(dtype)};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "[" : ", ") + std::to_string(shape[i]);
  }
  return text + (shape.empty() ? "[]" : "]");
}

// The attributes of one call.
class Attributes {
 public:
  Attributes& integer(const char* name, std::int64_t value) {
    return add({name, LAWSON_ATTRIBUTE_INTEGER, value, 0, nullptr, nullptr});
  }
  Attributes& number(const char* name, double value) {
    return add({name, LAWSON_ATTRIBUTE_NUMBER, 0, value, nullptr, nullptr});
  }
  Attributes& flag(const char* name, bool value) {
    return add({name, LAWSON_ATTRIBUTE_FLAG, value ? 1 : 0, 0, nullptr, nullptr});
  }
  // Unset: the op's own choice.
  Attributes& dtype(lawson_dtype value) {
    if (value == LAWSON_DTYPE_UNSET) return *this;
    return add({"dtype", LAWSON_ATTRIBUTE_DTYPE, value, 0, nullptr, nullptr});
  }
  // Refers to the list.
  Attributes& integers(const char* name, const Dims& list) {
    return add({name, LAWSON_ATTRIBUTE_INTEGERS, static_cast<std::int64_t>(list.size()), 0,
                list.data(), nullptr});
  }
  Attributes& text(const char* name, const char* value) {
    return add({name, LAWSON_ATTRIBUTE_TEXT, 0, 0, nullptr, value});
  }

  std::span<const lawson_attribute> list() const { return {list_.data(), size_}; }

 private:
  Attributes& add(const lawson_attribute& attribute) {
    if (size_ == list_.size()) throw Error(LAWSON_INVALID_ARGUMENT, "too many attributes");
    list_[size_++] = attribute;
    return *this;
  }

  std::array<lawson_attribute, 16> list_;
  std::size_t size_ = 0;
};

// An op as it is called. Inputs are indices of the record's tensors, -1 where absent.
struct Call {
  std::string_view op;
  std::span<const std::int32_t> inputs;
  std::span<const lawson_attribute> attributes;
  std::uint32_t results = 1;  // bit i: result i is wanted
  Place place;
};

struct TracedTensor {
  lawson_dtype dtype = LAWSON_DTYPE_UNSET;
  Dims shape;
};

// What a function did with inputs of one signature.
class Record {
 public:
  std::vector<TracedTensor> tensors;  // the inputs, then every op's results
  std::size_t inputs = 0;
  std::vector<std::int32_t> outputs;

  std::size_t op_count() const { return ops_.size(); }

  bool is_same(std::size_t index, const Call& call) const {
    const Op& op = ops_[index];
    if (op.results != call.results || op.name != call.op || op.input_count != call.inputs.size() ||
        op.attribute_count != call.attributes.size()) {
      return false;
    }
    const std::int32_t* mine = operands_.data() + op.input_begin;
    for (std::size_t i = 0; i < call.inputs.size(); ++i) {
      if (mine[i] != call.inputs[i]) return false;
    }
    for (std::size_t i = 0; i < call.attributes.size(); ++i) {
      if (!attributes_[op.attribute_begin + i].is_same(call.attributes[i])) return false;
    }
    return true;
  }

  // Whether the first `count` ops are those of the other one.
  bool begins_as(const Record& other, std::size_t count) const {
    if (ops_.size() < count || other.ops_.size() < count) return false;
    bool is_same_so_far = true;
    std::size_t index = 0;
    other.replay(count, [&](const Call& call) {
      is_same_so_far = is_same_so_far && is_same(index++, call);
    });
    return is_same_so_far;
  }

  bool is_equal(const Record& other) const {
    return ops_.size() == other.ops_.size() && outputs == other.outputs &&
           begins_as(other, ops_.size());
  }

  std::int32_t first_result(std::size_t index) const { return ops_[index].first_result; }

  void add(const Call& call, std::int32_t first_result) {
    ops_.push_back({std::string{call.op}, operands_.size(), call.inputs.size(), attributes_.size(),
                    call.attributes.size(), call.results, first_result, call.place});
    operands_.insert(operands_.end(), call.inputs.begin(), call.inputs.end());
    for (const lawson_attribute& attribute : call.attributes) attributes_.emplace_back(attribute);
  }

  // Calls `again(call)` for the first `count` ops.
  template <typename F>
  void replay(std::size_t count, F&& again) const {
    for (std::size_t i = 0; i < count; ++i) {
      const Op& op = ops_[i];
      std::vector<lawson_attribute> attributes;
      for (std::size_t a = 0; a < op.attribute_count; ++a) {
        attributes.push_back(attributes_[op.attribute_begin + a].given());
      }
      again(Call{op.name,
                 {operands_.data() + op.input_begin, op.input_count},
                 attributes,
                 op.results,
                 op.place});
    }
  }

 private:
  class Attribute {
   public:
    explicit Attribute(const lawson_attribute& given)
        : name_{given.name},
          type_{given.type},
          integer_{given.integer},
          number_{given.number},
          text_{given.text == nullptr ? "" : given.text} {
      if (given.integers != nullptr) list_.assign(given.integers, given.integers + given.integer);
    }

    bool is_same(const lawson_attribute& other) const {
      return type_ == other.type && integer_ == other.integer &&
             std::bit_cast<std::uint64_t>(number_) == std::bit_cast<std::uint64_t>(other.number) &&
             name_ == other.name && (other.text == nullptr ? text_.empty() : text_ == other.text) &&
             std::equal(list_.begin(), list_.end(), other.integers,
                        other.integers + (other.integers == nullptr ? 0 : other.integer));
    }

    lawson_attribute given() const {
      return {name_.c_str(), type_,
              integer_,      number_,
              list_.data(),  type_ == LAWSON_ATTRIBUTE_TEXT ? text_.c_str() : nullptr};
    }

   private:
    std::string name_;
    std::int32_t type_;
    std::int64_t integer_;
    double number_;
    std::vector<std::int64_t> list_;
    std::string text_;
  };

  struct Op {
    std::string name;
    std::size_t input_begin, input_count;
    std::size_t attribute_begin, attribute_count;
    std::uint32_t results;
    std::int32_t first_result;
    Place place;
  };

  std::vector<Op> ops_;
  std::vector<std::int32_t> operands_;
  std::vector<Attribute> attributes_;
};

using BuilderHandle = Handle<lawson_graph_builder, lawson_graph_builder_destroy>;

// A record in the making, and the graph of it.
class Recording {
 public:
  // `inputs` as the builder takes them.
  Recording(const std::string& name, bool strict, std::span<const lawson_graph_input> inputs)
      : builder_{make<lawson_graph_builder>(lawson_graph_builder_create, name.c_str())} {
    check(lawson_graph_builder_strict(builder_.get(), strict ? 1 : 0));
    for (const lawson_graph_input& input : inputs) {
      lawson_tensor_id id = LAWSON_NO_TENSOR;
      check(lawson_graph_builder_input(builder_.get(), &input, &id));
      keep(id);
    }
    record.inputs = inputs.size();
  }

  std::int32_t add(const Call& call) {
    std::vector<lawson_tensor_id> inputs;
    for (const std::int32_t index : call.inputs) {
      inputs.push_back(index < 0 ? LAWSON_NO_TENSOR : ids_[static_cast<std::size_t>(index)]);
    }
    const auto slots = static_cast<std::size_t>(std::bit_width(call.results));
    std::vector<lawson_tensor_id> made(slots, LAWSON_NO_TENSOR);
    std::vector<lawson_tensor_id*> wanted(slots, nullptr);
    for (std::size_t i = 0; i < slots; ++i) {
      if ((call.results >> i & 1U) != 0) wanted[i] = &made[i];
    }
    check(lawson_graph_builder_source(builder_.get(), call.place.text().c_str()));
    check(lawson_graph_builder_op_results(builder_.get(), std::string{call.op}.c_str(),
                                          inputs.data(), inputs.size(), call.attributes.data(),
                                          call.attributes.size(), wanted.data(), slots));
    const auto first = static_cast<std::int32_t>(record.tensors.size());
    for (const lawson_tensor_id id : made) {
      if (id != LAWSON_NO_TENSOR) keep(id);
    }
    record.add(call, first);
    return first;
  }

  // With the outputs' layouts, by default contiguous.
  Handle<lawson_graph, lawson_graph_destroy> finish(std::span<const std::int32_t> outputs,
                                                    std::span<const lawson_graph_output> layouts) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      check(lawson_graph_builder_output(builder_.get(), ids_[static_cast<std::size_t>(outputs[i])],
                                        i < layouts.size() ? &layouts[i] : nullptr));
    }
    record.outputs.assign(outputs.begin(), outputs.end());
    return Handle<lawson_graph, lawson_graph_destroy>{
        make<lawson_graph>(lawson_graph_builder_finish, builder_.get())};
  }

  Record record;

 private:
  void keep(lawson_tensor_id id) {
    lawson_tensor_info info{};
    info.struct_size = sizeof(info);
    check(lawson_graph_builder_tensor(builder_.get(), id, &info));
    const std::span<const std::int64_t> shape{info.shape, static_cast<std::size_t>(info.rank)};
    record.tensors.push_back({dtype_named(info.dtype), Dims{shape}});
    ids_.push_back(id);
  }

  BuilderHandle builder_;
  std::vector<lawson_tensor_id> ids_;  // of record.tensors
};

// Where a trace begins when nothing is known, or another record where the known one does not go on
// as the function does.
class TraceSource {
 public:
  virtual ~TraceSource() = default;
  virtual std::unique_ptr<Recording> record() const = 0;
  // Another record that begins with the first `count` ops of `known` and goes on with the call;
  // null when there is none. It lives as long as the source.
  virtual const Record* other(const Record& known, std::size_t count, const Call& call) const = 0;
};

// One run of a traced function, on the thread that it is for.
class Tracer {
 public:
  // `known` may be null.
  Tracer(const TraceSource& source, const Record* known) : source_{source}, known_{known} {
    thread_local std::uint64_t last = 0;
    if (last == 0) last = next_thread();
    trace_ = ++last;
    if (known_ == nullptr) recording_ = source_.record();
    before_ = current_;
    current_ = this;
  }
  ~Tracer() { current_ = before_; }
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  static Tracer& current(const char* op) {
    if (current_ == nullptr) {
      throw Error(LAWSON_INVALID_ARGUMENT,
                  std::string{op} + ": tensors are values of a function that is being traced");
    }
    return *current_;
  }

  Tensor input(std::size_t index) const { return {trace_, static_cast<std::int32_t>(index)}; }

  // The first of the call's results; wanted ones follow each other.
  std::int32_t add(const Call& call) {
    if (recording_ == nullptr) [[likely]] {
      if (next_ < known_->op_count() && known_->is_same(next_, call)) [[likely]] {
        return known_->first_result(next_++);
      }
      if (const Record* other = source_.other(*known_, next_, call)) {
        known_ = other;
        return known_->first_result(next_++);
      }
      leave();
    }
    return recording_->add(call);
  }

  Tensor result(std::int32_t index) const { return {trace_, index}; }

  std::int32_t index_of(const Tensor& tensor, const char* op) const {
    if (tensor.trace_ == trace_) [[likely]] {
      return tensor.index_;
    }
    if (tensor.trace_ == 0) return -1;
    throw Error(LAWSON_INVALID_ARGUMENT, std::string{op} + ": a tensor of another trace");
  }

  const TracedTensor& traced(std::int32_t index) const {
    if (index < 0) throw Error(LAWSON_INVALID_ARGUMENT, "a tensor that is absent has no shape");
    const Record& record = recording_ == nullptr ? *known_ : recording_->record;
    return record.tensors[static_cast<std::size_t>(index)];
  }

  const TracedTensor& traced(const Tensor& tensor) const {
    return traced(index_of(tensor, "tensor"));
  }

  // A number becomes a constant of `like`'s dtype.
  std::int32_t operand(const Operand& given, lawson_dtype like, const char* op) {
    if (!given.is_number_) return index_of(given.tensor_, op);
    Attributes attributes;
    attributes.number("value", given.number_).dtype(constant_dtype(given.number_, like));
    return add({"constant", {}, attributes.list(), 1, place(given)});
  }

  lawson_dtype dtype_of(const Operand& given, const char* op) const {
    if (given.is_number_) return LAWSON_DTYPE_UNSET;
    const std::int32_t index = index_of(given.tensor_, op);
    return index < 0 ? LAWSON_DTYPE_UNSET : traced(index).dtype;
  }

  static bool is_number(const Operand& operand) { return operand.is_number_; }
  static Place place(const Operand& operand) { return {operand.file_, operand.line_}; }

  // The known record when the function did exactly that, else null: then recording() has it.
  const Record* finish(std::span<const std::int32_t> outputs) {
    if (recording_ != nullptr) return nullptr;
    if (next_ == known_->op_count() && std::equal(outputs.begin(), outputs.end(),
                                                  known_->outputs.begin(), known_->outputs.end())) {
      return known_;
    }
    leave();
    return nullptr;
  }
  Recording& recording() { return *recording_; }

 private:
  static std::uint64_t next_thread() {
    static std::atomic<std::uint64_t> threads{0};
    return ++threads << 40;
  }

  static lawson_dtype constant_dtype(double value, lawson_dtype like) {
    switch (like) {
      case LAWSON_DTYPE_F64:
      case LAWSON_DTYPE_F32:
      case LAWSON_DTYPE_F16:
      case LAWSON_DTYPE_BF16:
        return like;
      case LAWSON_DTYPE_I64:
      case LAWSON_DTYPE_I32:
      case LAWSON_DTYPE_I8:
      case LAWSON_DTYPE_U8: {
        const double high = like == LAWSON_DTYPE_I8    ? 127
                            : like == LAWSON_DTYPE_U8  ? 255
                            : like == LAWSON_DTYPE_I32 ? 2147483647
                                                       : kExactIntegers - 1;
        const double low = like == LAWSON_DTYPE_U8 ? 0 : -high - 1;
        return std::trunc(value) == value && value >= low && value <= high ? like
                                                                           : LAWSON_DTYPE_F32;
      }
      default:
        return LAWSON_DTYPE_F32;
    }
  }

  // From here on the function does something else than what is known.
  void leave() {
    std::unique_ptr<Recording> fresh = source_.record();
    known_->replay(next_, [&](const Call& call) { fresh->add(call); });
    recording_ = std::move(fresh);
  }

  static inline constinit thread_local Tracer* current_ = nullptr;

  const TraceSource& source_;
  const Record* known_;
  std::size_t next_ = 0;  // op of known_
  std::unique_ptr<Recording> recording_;
  std::uint64_t trace_ = 0;
  Tracer* before_ = nullptr;
};

inline Error no_axis(std::int64_t axis, std::size_t rank) {
  return {LAWSON_INVALID_ARGUMENT,
          "axis " + std::to_string(axis) + " of a tensor of rank " + std::to_string(rank)};
}

template <std::size_t N>
Tensor call(const char* op, const std::array<Operand, N>& operands, const Attributes& attributes) {
  Tracer& tracer = Tracer::current(op);
  lawson_dtype like = LAWSON_DTYPE_UNSET;
  if (std::any_of(operands.begin(), operands.end(), Tracer::is_number)) {
    for (std::size_t i = 0; i < N && like == LAWSON_DTYPE_UNSET; ++i) {
      like = tracer.dtype_of(operands[i], op);
    }
  }
  std::array<std::int32_t, N> inputs{};
  for (std::size_t i = 0; i < N; ++i) inputs[i] = tracer.operand(operands[i], like, op);
  return tracer.result(tracer.add({op, inputs, attributes.list(), 1, Tracer::place(operands[0])}));
}

template <std::size_t N>
Tensor call(const char* op, const std::array<Operand, N>& operands) {
  return call(op, operands, Attributes{});
}

// Negative axes counted from the end.
inline Dims counted(std::size_t rank, Dims axes) {
  for (std::int64_t& axis : axes) {
    if (axis < -static_cast<std::int64_t>(rank)) throw no_axis(axis, rank);
    axis += axis < 0 ? static_cast<std::int64_t>(rank) : 0;
  }
  return axes;
}
inline Dims axes_of(std::size_t rank, const Dims& given) {
  Dims axes = counted(rank, given);
  std::sort(axes.begin(), axes.end());
  return axes;
}

}  // namespace detail

inline lawson_dtype Tensor::dtype() const {
  return detail::Tracer::current("dtype").traced(*this).dtype;
}
inline Dims Tensor::shape() const {
  return detail::Tracer::current("shape").traced(*this).shape;
}
inline std::int64_t Tensor::dim(std::int64_t axis) const {
  const Dims dims = shape();
  const auto rank = static_cast<std::int64_t>(dims.size());
  const std::int64_t index = axis < 0 ? axis + rank : axis;
  if (index < 0 || index >= rank) throw detail::no_axis(axis, dims.size());
  return dims[static_cast<std::size_t>(index)];
}

}  // namespace lawson

#endif  // LAWSON_TRACE_HPP_
