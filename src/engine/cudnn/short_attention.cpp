#include "engine/cudnn/short_attention.h"

#include <algorithm>

#include "engine/cudnn/facts.h"
#include "engine/cudnn/tuning_table.h"

namespace lawson::cudnn {
namespace {

// Measured on an H200 with cuDNN 9.19.0 (bench/NOTES.md): 0.6 of the time for 64 keys, 0.9 for 128
// of depth 64, level for 128 of depth 128, slower beyond.
constexpr int kMeasuredCapability = 900;
constexpr const char* kMeasuredCudnn = "9.19.0";
constexpr std::int64_t kMostElements = 8192;  // of K or V, for one head
constexpr std::int64_t kMostRows = 128;

constexpr std::string_view kWithCounter = "_k24=7";
constexpr std::string_view kWithout = "_k24=3";

}  // namespace

std::string plan_for_few_keys(const ir::Graph& graph, const Device& device, int cudnn_version,
                              const std::vector<std::string>& names) {
  if (device.compute_capability != kMeasuredCapability ||
      !same_family(kMeasuredCudnn, cudnn_version)) {
    return "";
  }
  const auto facts = attention_facts(graph);
  if (!facts || facts->backward || facts->s_q > kMostRows) return "";
  if (facts->s_kv * std::max(facts->d_qk, facts->d_v) > kMostElements) return "";
  if (names.empty() || !names.front().ends_with(kWithCounter)) return "";
  const auto found =
      std::ranges::find_if(names, [](const std::string& name) { return name.ends_with(kWithout); });
  return found == names.end() ? "" : *found;
}

}  // namespace lawson::cudnn
