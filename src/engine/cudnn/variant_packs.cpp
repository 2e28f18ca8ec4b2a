#include "engine/cudnn/variant_packs.h"

#include <cudnn.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>

#include "base/lazy.h"
#include "engine/cudnn/loader.h"

namespace lawson::cudnn {

// Looked up once: the frontend's own way locks a mutex and asks dlsym at every call.
struct VariantPacks::Calls {
  decltype(&cudnnBackendCreateDescriptor) create;
  decltype(&cudnnBackendDestroyDescriptor) destroy;
  decltype(&cudnnBackendSetAttribute) set;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;
  decltype(&cudnnBackendPopulateCudaGraph) populate_graph;
  decltype(&cudnnBackendUpdateCudaGraph) update_graph;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnGetErrorString) error_string;
  decltype(&cudnnGetLastErrorString) last_error;

  static Result<Calls> find() {
    LAWSON_TRY(const Libraries* libraries, cudnn::libraries());
    Calls calls{};
    const char* missing = nullptr;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          dlsym(libraries->cudnn.handle, name));
      if (function == nullptr) missing = name;
    };
    find(calls.create, "cudnnBackendCreateDescriptor");
    find(calls.destroy, "cudnnBackendDestroyDescriptor");
    find(calls.set, "cudnnBackendSetAttribute");
    find(calls.finalize, "cudnnBackendFinalize");
    find(calls.execute, "cudnnBackendExecute");
    find(calls.set_stream, "cudnnSetStream");
    find(calls.error_string, "cudnnGetErrorString");
    find(calls.last_error, "cudnnGetLastErrorString");
    if (missing != nullptr) {
      return error(ErrorKind::unavailable, "{} (cuDNN {}) has no {}", libraries->cudnn.path,
                   libraries->cudnn.version, missing);
    }
    // From cuDNN 9.5 on; no execution needs them.
    find(calls.populate_graph, "cudnnBackendPopulateCudaGraph");
    find(calls.update_graph, "cudnnBackendUpdateCudaGraph");
    return calls;
  }

  Failure check(cudnnStatus_t status, const char* call) const {
    if (status == CUDNN_STATUS_SUCCESS) return std::nullopt;
    std::array<char, 1024> detail{};
    last_error(detail.data(), detail.size());
    return StageError{"execute", "CUDNN_BACKEND_API_FAILED",
                      fmt::format("{} failed with code: {} {}", call, error_string(status),
                                  std::string_view{detail.data()})};
  }
};

struct VariantPacks::Pack {
  const Calls& calls;
  cudnnBackendDescriptor_t descriptor = nullptr;
  std::vector<void*> pointers;  // of all uids
  void* workspace = nullptr;

  explicit Pack(const Calls& found) : calls{found} {}
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;
  ~Pack() {
    if (descriptor != nullptr) calls.destroy(descriptor);
  }
};

Result<std::unique_ptr<VariantPacks>> VariantPacks::make(const BackendPlan& plan) {
  static Lazy<const Result<Calls>> found;
  const Result<Calls>& calls = found.get(Calls::find);
  if (!calls.ok()) return calls.error();
  return std::unique_ptr<VariantPacks>{new VariantPacks{plan, *calls}};
}

VariantPacks::~VariantPacks() {
  while (Pack* pack = packs_.take()) delete pack;
}

Failure VariantPacks::make_pack(std::span<void* const> pointers, void* workspace,
                                std::unique_ptr<Pack>& pack) {
  if (!pack) {
    pack = std::make_unique<Pack>(calls_);
    pack->pointers = plan_.pointers;
  } else {
    calls_.destroy(std::exchange(pack->descriptor, nullptr));
  }
  for (std::size_t i = 0; i < plan_.slots.size(); ++i) {
    pack->pointers[static_cast<std::size_t>(plan_.slots[i])] = pointers[i];
  }
  pack->workspace = workspace;
  for (const BackendPlan::Aligned& aligned : plan_.aligned) {
    const auto slot = static_cast<std::size_t>(aligned.slot);
    if (std::bit_cast<std::uintptr_t>(pack->pointers[slot]) %
            static_cast<std::uintptr_t>(aligned.bytes) !=
        0) {
      return StageError{
          "execute", "INVALID_VARIANT_PACK",
          fmt::format("tensor {} is bound to {}, which is not aligned to {} bytes",
                      plan_.uids[slot], fmt::ptr(pack->pointers[slot]), aligned.bytes)};
    }
  }
  const auto count = static_cast<std::int64_t>(plan_.uids.size());
  const auto set = [&](cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                       std::int64_t elements, const void* values) {
    return calls_.check(calls_.set(pack->descriptor, name, type, elements, values),
                        "cudnnBackendSetAttribute");
  };
  Failure failure =
      calls_.check(calls_.create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack->descriptor),
                   "cudnnBackendCreateDescriptor");
  if (!failure) {
    failure = set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &pack->workspace);
  }
  if (!failure) {
    failure = set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count,
                  pack->pointers.data());
  }
  if (!failure) {
    failure = set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, plan_.uids.data());
  }
  if (!failure) failure = calls_.check(calls_.finalize(pack->descriptor), "cudnnBackendFinalize");
  return failure;
}

Failure VariantPacks::pack_for(std::span<void* const> pointers, void* workspace,
                               std::unique_ptr<Pack>& pack) {
  pack.reset(packs_.take());
  if (pack && pack->workspace == workspace) {
    bool same = true;
    for (std::size_t i = 0; same && i < plan_.slots.size(); ++i) {
      same = pack->pointers[static_cast<std::size_t>(plan_.slots[i])] == pointers[i];
    }
    if (same) return std::nullopt;
  }
  return make_pack(pointers, workspace, pack);
}

// A pack that nobody finalised is none.
void VariantPacks::keep(std::unique_ptr<Pack> pack) {
  if (packs_.give_back(pack.get())) static_cast<void>(pack.release());
}

Failure VariantPacks::execute(void* handle, std::span<void* const> pointers, void* workspace,
                              void* stream) {
  auto* const context = static_cast<cudnnHandle_t>(handle);
  Failure failure =
      calls_.check(calls_.set_stream(context, static_cast<cudaStream_t>(stream)), "cudnnSetStream");
  if (failure) return failure;
  std::unique_ptr<Pack> pack;
  if (failure = pack_for(pointers, workspace, pack); failure) return failure;
  failure = calls_.check(calls_.execute(context, plan_.descriptor, pack->descriptor),
                         "cudnnBackendExecute");
  keep(std::move(pack));
  return failure;
}

namespace {

StageError no_graphs() {
  return {"execute", "GRAPH_NOT_SUPPORTED",
          "this cuDNN cannot add plans to CUDA graphs (9.5 and newer can)"};
}

}  // namespace

Failure VariantPacks::add_to_graph(void* handle, std::span<void* const> pointers, void* workspace,
                                   void* graph) {
  if (calls_.populate_graph == nullptr) return no_graphs();
  std::unique_ptr<Pack> pack;
  if (Failure failure = make_pack(pointers, workspace, pack)) return failure;
  return calls_.check(calls_.populate_graph(static_cast<cudnnHandle_t>(handle), plan_.descriptor,
                                            pack->descriptor, static_cast<cudaGraph_t>(graph)),
                      "cudnnBackendPopulateCudaGraph");
}

Failure VariantPacks::update_graph(void* handle, std::span<void* const> pointers, void* workspace,
                                   void* graph) {
  if (calls_.update_graph == nullptr) return no_graphs();
  std::unique_ptr<Pack> pack;
  if (Failure failure = make_pack(pointers, workspace, pack)) return failure;
  return calls_.check(calls_.update_graph(static_cast<cudnnHandle_t>(handle), plan_.descriptor,
                                          pack->descriptor, static_cast<cudaGraph_t>(graph)),
                      "cudnnBackendUpdateCudaGraph");
}

}  // namespace lawson::cudnn
