#include "engine/registry.h"

#include "base/lazy.h"
#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#ifdef LAWSON_HAVE_CUDNN
#include "engine/cudnn/engine.h"
#include "engine/cudnn/loader.h"
#endif

namespace lawson {

const std::vector<std::shared_ptr<Engine>>& engines() {
  static Lazy<const std::vector<std::shared_ptr<Engine>>> list;
  return list.get([] {
    return std::vector<std::shared_ptr<Engine>>{
#ifdef LAWSON_HAVE_CUDNN
        make_cudnn_engine(),
#endif
        make_cpu_engine(),
        make_reference_engine(),
    };
  });
}

Engine* find_engine(std::string_view name) {
  for (const auto& engine : engines()) {
    if (engine->name() == name) return engine.get();
  }
  return nullptr;
}

void choose_cudnn([[maybe_unused]] const std::string& path) {
#ifdef LAWSON_HAVE_CUDNN
  cudnn::choose_cudnn(path);
#endif
}

}  // namespace lawson
