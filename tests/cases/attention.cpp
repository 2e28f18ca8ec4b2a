// The attention list: first rows with every pair of levels of attention_axes.cpp, then random ones.
#include <algorithm>

#include "cases/attention_axes.h"
#include "cases/cases.h"

namespace lawson::cases {
namespace {

// So many unusual things at once that a GPU may still take the case.
constexpr std::size_t kMostFeatures = 3;

// Without the fields that say what is the default anyway.
Json document_of(const front::AttentionSpec& spec) {
  Json document = front::attention_to_json(spec);
  const Json defaults = front::attention_to_json({});
  for (const char* field : {"mask", "window", "bias", "softmax", "softcap", "dropout",
                            "deterministic", "return_stats", "return_max_logit", "cuda_graph"}) {
    if (document[field] == defaults[field]) document.erase(field);
  }
  if (!spec.scale) document.erase("scale");
  return document;
}

class AttentionList {
 public:
  AttentionList(std::uint64_t seed, Profile profile)
      : profile_{profile},
        seed_{seed},
        axes_{attention_axes(profile)},
        covering_{axes_, seed, profile == Profile::gpu ? kMostFeatures : axes_.size(),
                  [this](const Row& row) { return draw(row).has_value(); }},
        dice_{seed * 1000003 + 1} {}

  Case next() {
    std::optional<Row> row = covering_.next();
    const char* kind = row ? "pairs" : "attention";
    if (!row) row = random_row(axes_, dice_, [this](const Row& r) { return draw(r).has_value(); });
    AttentionDraw drawn = *draw(*row);
    drawn.spec.name = fmt::format("{}-{}", kind, count_);
    return {drawn.spec.name, document_of(drawn.spec), seed_ + count_++, drawn.style};
  }

  AttentionCoverage coverage() {
    AttentionCoverage result;
    result.pairs = covering_.pairs();
    while (covering_.next()) ++result.rows;
    result.impossible = covering_.impossible();
    return result;
  }

 private:
  std::optional<AttentionDraw> draw(const Row& row) const {
    return draw_attention(axes_, row, seed_, profile_);
  }

  Profile profile_;
  std::uint64_t seed_;
  std::vector<Axis> axes_;
  Covering covering_;
  Dice dice_;
  std::uint64_t count_ = 0;
};

}  // namespace

std::vector<Case> attention_cases(std::uint64_t seed, int count, Profile profile) {
  AttentionList list(seed, profile);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) cases.push_back(list.next());
  return cases;
}

AttentionCoverage attention_coverage(std::uint64_t seed, Profile profile) {
  return AttentionList(seed, profile).coverage();
}

std::vector<Case> sampled(std::vector<Case> cases, std::size_t count, std::uint64_t seed) {
  if (cases.size() <= count) return cases;
  const auto random = std::partition_point(
      cases.begin(), cases.end(), [](const Case& item) { return item.name.starts_with("pairs-"); });
  // Of the rest, which are in order: those that a draw without replacement takes.
  Dice dice(seed);
  std::vector<Case> sample(cases.begin(), random);
  sample.resize(std::min(sample.size(), count));
  for (auto item = random; item != cases.end(); ++item) {
    const auto left = static_cast<std::int64_t>(cases.end() - item);
    if (dice.below(left) < static_cast<std::int64_t>(count - sample.size())) {
      sample.push_back(std::move(*item));
    }
  }
  return sample;
}

}  // namespace lawson::cases
