#include "engine/cudnn/defects.h"

#include <array>
#include <limits>

#include "engine/cudnn/facts.h"

namespace lawson::cudnn {
namespace {

constexpr int kOpen = std::numeric_limits<int>::max();  // no release with a fix is known

struct Row {
  int first_version;
  int last_version;
  const char* id;
  const char* source;
  const char* field;
  bool barred;
  const char* message;
  bool (*applies)(const AttentionFacts&, int compute_capability);
};

bool is_hopper(int compute_capability) { return compute_capability / 100 == 9; }

// Columns past the last key are masked anyway when the right bound keeps every row below s_kv.
bool tail_is_masked(const AttentionFacts& facts) {
  if (facts.rule->padding) return true;
  if (facts.rule->right < 0) return false;
  const std::int64_t last_row =
      facts.rule->alignment == ir::Alignment::bottom_right ? facts.s_kv - 1 : facts.s_q - 1;
  return last_row + facts.rule->right < facts.s_kv;
}

constexpr std::array kRows{
    Row{91000, 91001, "attention-9.10", "cuDNN 9.10.2 release notes", "cudnn_version", true,
        "cuDNN 9.10.0 and 9.10.1 compute attention wrongly; 9.10.2 or later does not",
        [](const AttentionFacts&, int) { return true; }},
    Row{91400, 91400, "window-9.14.0", "cuDNN 9.14.1 release notes", "window", true,
        "cuDNN 9.14.0 computes windows without a right bound wrongly when seqlen_kv > 1024; 9.14.1 "
        "or later does not",
        [](const AttentionFacts& facts, int) {
          return facts.rule->left >= 0 && facts.rule->right < 0 && facts.s_kv > 1024;
        }},
    // The kernel walks keys in tiles of 128 and masks them in tiles of 64: the zero-filled half of
    // the last tile is scored 0, and exp(0 - LSE) overflows.
    Row{91501, kOpen, "hopper-backward-kv-tail", "pytorch#196678", "seqlen_kv", false,
        "cuDNN's Hopper backward returns NaN in dQ for query rows whose log-sum-exp is below -88.7 "
        "when seqlen_kv mod 128 is 64; a padding mask with seqlen_kv rounded up to 128 avoids it",
        [](const AttentionFacts& facts, int compute_capability) {
          return facts.backward && is_hopper(compute_capability) && facts.s_kv % 128 == 64 &&
                 !tail_is_masked(facts);
        }},
    Row{92500, kOpen, "hopper-backward-one-query", "cudnn-frontend#1072", "seqlen_q", false,
        "cuDNN's Hopper backward returns NaN in dK and dV for seqlen_q = 1 with a very negative "
        "log-sum-exp; a padding mask with full lengths avoids it",
        [](const AttentionFacts& facts, int compute_capability) {
          return facts.backward && is_hopper(compute_capability) && facts.s_q == 1 &&
                 !facts.rule->padding;
        }},
};

}  // namespace

std::optional<Defect> known_defect(const ir::Graph& graph, const Device& device,
                                   int cudnn_version) {
  const auto facts = attention_facts(graph);
  if (!facts) return std::nullopt;
  for (const Row& row : kRows) {
    if (cudnn_version < row.first_version || cudnn_version > row.last_version) continue;
    if (!row.applies(*facts, device.compute_capability)) continue;
    return Defect{row.id, row.message, row.source, row.field, row.barred};
  }
  return std::nullopt;
}

}  // namespace lawson::cudnn
