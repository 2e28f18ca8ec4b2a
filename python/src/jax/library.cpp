// The handlers that XLA calls, one set for each target and platform.
#include <mutex>
#include <optional>

#include "jax/call.h"

#define LAWSON_JAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace lawson::jax {
namespace {

enum class Platform { cpu, cuda };

// The runtimes of two platforms give out type ids of their own.
template <Platform P>
struct State {
  static ffi::TypeId id;

  std::unique_ptr<Call> call;
};
template <Platform P>
ffi::TypeId State<P>::id{};

ffi::ErrorCode code_of(lawson_status status) {
  switch (status) {
    case LAWSON_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case LAWSON_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case LAWSON_UNAVAILABLE:
      return ffi::ErrorCode::kUnavailable;
    case LAWSON_OUT_OF_MEMORY:
      return ffi::ErrorCode::kResourceExhausted;
    case LAWSON_CANCELLED:
      return ffi::ErrorCode::kCancelled;
    default:
      return ffi::ErrorCode::kInternal;
  }
}

// No exception crosses into XLA.
template <typename F>
std::optional<ffi::Error> caught(const F& function) noexcept {
  const auto failed = [](ffi::ErrorCode code, const char* message) {
    return ffi::Error{code, std::string{"Lawson: "} + message};
  };
  try {
    function();
    return std::nullopt;
  } catch (const Error& error) {
    return failed(code_of(error.status()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(ffi::ErrorCode::kResourceExhausted, "out of host memory");
  } catch (const std::exception& error) {
    return failed(ffi::ErrorCode::kInternal, error.what());
  } catch (...) {
    return failed(ffi::ErrorCode::kInternal, "an unknown exception");
  }
}

template <typename F>
ffi::Error guarded(const F& function) {
  return caught(function).value_or(ffi::Error::Success());
}

// At the first call of an instantiate handler, in which XLA asks for the type's id. From Python it
// would be too late: JAX's queue of what is registered before its backends start has the handlers
// before the types.
template <Platform P>
XLA_FFI_Error* register_type(const XLA_FFI_Api* api) {
  static const ffi::TypeInfo kInfo = ffi::MakeTypeInfo<State<P>>();
  static std::mutex mutex;
  const std::lock_guard lock{mutex};
  if (State<P>::id.type_id != XLA_FFI_UNKNOWN_TYPE_ID.type_id) return nullptr;
  constexpr std::string_view kName = "lawson_call";
  XLA_FFI_Type_Register_Args args{};
  args.struct_size = XLA_FFI_Type_Register_Args_STRUCT_SIZE;
  args.name = {kName.data(), kName.size()};
  args.type_id = &State<P>::id;
  args.type_info = &kInfo;
  return api->XLA_FFI_Type_Register(&args);
}

template <Platform P, auto Make>
ffi::ErrorOr<std::unique_ptr<State<P>>> instantiate(ffi::Dictionary attributes) {
  std::unique_ptr<State<P>> state;
  auto error = caught([&] {
    state = std::make_unique<State<P>>();
    state->call = Make(attributes);
  });
  if (error) return ffi::Unexpected{std::move(*error)};
  return state;
}

ffi::Error initialize_cpu(State<Platform::cpu>* state) {
  return guarded([&] { state->call->initialize({}); });
}
ffi::Error initialize_cuda(std::int32_t ordinal, State<Platform::cuda>* state) {
  return guarded([&] { state->call->initialize({true, ordinal}); });
}

ffi::Error execute_cpu(State<Platform::cpu>* state, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  return guarded([&] { state->call->execute({}, Buffers{args, rets}, nullptr); });
}
ffi::Error execute_cuda(std::int32_t ordinal, void* stream, State<Platform::cuda>* state,
                        ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] { state->call->execute({true, ordinal}, Buffers{args, rets}, stream); });
}

// Shows that this runtime takes handlers of this library; on the CPU it also copies.
ffi::Error probe(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Success();
}

}  // namespace
}  // namespace lawson::jax

using lawson::jax::Platform;
using lawson::jax::State;
namespace ffi = xla::ffi;

// A C function whose handler is made at its first call.
#define LAWSON_JAX_HANDLER(name, implementation, binding, ...)                          \
  LAWSON_JAX_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {                     \
    static auto* const handler = (binding).To(implementation, {__VA_ARGS__}).release(); \
    return handler->Call(frame);                                                        \
  }

#define LAWSON_JAX_INSTANTIATE(name, platform, make)                               \
  LAWSON_JAX_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {                \
    XLA_FFI_Error* error = lawson::jax::register_type<platform>(frame->api);       \
    if (error != nullptr) return error;                                            \
    static auto* const handler = ffi::Ffi::BindInstantiate()                       \
                                     .Attrs()                                      \
                                     .To(lawson::jax::instantiate<platform, make>) \
                                     .release();                                   \
    return handler->Call(frame);                                                   \
  }

#define LAWSON_JAX_TARGET(target, make)                                                         \
  LAWSON_JAX_INSTANTIATE(lawson_jax_cpu_##target##_instantiate, Platform::cpu, make)            \
  LAWSON_JAX_HANDLER(lawson_jax_cpu_##target##_initialize, lawson::jax::initialize_cpu,         \
                     ffi::Ffi::BindInitialize().Ctx<ffi::State<State<Platform::cpu>>>())        \
  LAWSON_JAX_HANDLER(                                                                           \
      lawson_jax_cpu_##target##_execute, lawson::jax::execute_cpu,                              \
      ffi::Ffi::Bind().Ctx<ffi::State<State<Platform::cpu>>>().RemainingArgs().RemainingRets()) \
  LAWSON_JAX_INSTANTIATE(lawson_jax_cuda_##target##_instantiate, Platform::cuda, make)          \
  LAWSON_JAX_HANDLER(lawson_jax_cuda_##target##_initialize, lawson::jax::initialize_cuda,       \
                     ffi::Ffi::BindInitialize()                                                 \
                         .Ctx<ffi::DeviceOrdinal>()                                             \
                         .Ctx<ffi::State<State<Platform::cuda>>>())                             \
  LAWSON_JAX_HANDLER(lawson_jax_cuda_##target##_execute, lawson::jax::execute_cuda,             \
                     ffi::Ffi::Bind()                                                           \
                         .Ctx<ffi::DeviceOrdinal>()                                             \
                         .Ctx<ffi::PlatformStream<void*>>()                                     \
                         .Ctx<ffi::State<State<Platform::cuda>>>()                              \
                         .RemainingArgs()                                                       \
                         .RemainingRets(),                                                      \
                     ffi::Traits::kCmdBufferCompatible)

LAWSON_JAX_TARGET(plan, lawson::jax::make_plan_call)
LAWSON_JAX_TARGET(attention_forward, lawson::jax::make_forward_call)
LAWSON_JAX_TARGET(attention_backward, lawson::jax::make_backward_call)

LAWSON_JAX_HANDLER(lawson_jax_probe, lawson::jax::probe,
                   ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>())

// The FFI that this library was built for, as 1000 · major + minor.
LAWSON_JAX_EXPORT int lawson_jax_ffi_version() {
  return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR;
}
