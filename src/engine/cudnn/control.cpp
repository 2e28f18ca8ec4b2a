#include "engine/cudnn/control.h"

#include <map>
#include <mutex>

#include "base/lazy.h"
#include "diag/diag.h"
#include "engine/cudnn/devices.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/loader.h"
#include "engine/cudnn/lowering.h"

namespace lawson::cudnn {
namespace {

// A matmul of 16 x 16 x 16.
Result<ir::Graph> small_matmul(DType dtype) {
  ir::Builder builder{"small_matmul"};
  ir::Tensor a;
  a.name = "a";
  a.dtype = dtype;
  a.shape = {1, 16, 16};
  ir::Tensor b = a;
  b.name = "b";
  LAWSON_TRY(const ir::TensorId left, builder.input(a));
  LAWSON_TRY(const ir::TensorId right, builder.input(b));
  LAWSON_TRY(const ir::TensorId product, builder.add1(ir::Matmul{}, {left, right}));
  LAWSON_TRY(const ir::TensorId result,
             builder.add1(ir::Unary{ir::UnaryKind::relu, 0}, {product}, std::nullopt, "c"));
  LAWSON_CHECK(builder.output(result));
  return std::move(builder).finish();
}

}  // namespace

void prime() {
  static Lazy<bool> primed;
  primed.get([] {
    for (const Device& target : known_targets()) {
      if (target.compute_capability != 900) continue;
      const diag::About about{{"cudnn", "prime", {}, -1}};
      const auto graph = small_matmul(DType::f32);
      if (!graph.ok() || !need_cublaslt().ok()) return false;
      auto lowered = Lowered::lower(*graph, target, nullptr);
      if (lowered.ok()) static_cast<void>((*lowered)->judge(nullptr));
      return true;
    }
    return false;
  });
}

bool control_plan_builds(const Device& device) {
  static std::mutex mutex;
  static Lazy<std::map<int, bool>> known_controls;  // by compute capability
  std::map<int, bool>& controls = known_controls.get();
  const std::lock_guard lock{mutex};
  const auto known = controls.find(device.compute_capability);
  if (known != controls.end()) return known->second;
  const auto graph = small_matmul(DType::f16);
  const diag::About about{{"cudnn", "control", {}, device.ordinal}};
  bool builds = false;
  if (graph.ok()) {
    auto lowered = Lowered::lower(*graph, device, nullptr);
    auto handle = handle_for(device);
    if (lowered.ok() && handle.ok() && !(*lowered)->judge(handle->get())) {
      const std::size_t count = (*lowered)->plan_names().size();
      for (std::size_t i = 0; i < count && !builds; ++i) builds = !(*lowered)->build(i);
    }
  }
  controls[device.compute_capability] = builds;
  return builds;
}

}  // namespace lawson::cudnn
