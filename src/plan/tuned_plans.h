// Choices that were tuned, in the store: for each question the report, the chosen plan and the
// other candidates that were built, as CBOR {"report", "chosen", "plans"}. What is of another
// question, device or engine build is one warning, and as if it were not there.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "plan/store.h"
#include "plan/tuner.h"

namespace lawson::plan {

// The content of such an entry. INVALID_ARGUMENT or INTERNAL says what is wrong with it.
std::string tuned_to_bytes(const Tuned& tuned);
Result<Tuned> tuned_from_bytes(std::string_view bytes);

class TunedPlans {
 public:
  explicit TunedPlans(std::shared_ptr<Store> store) : store_{std::move(store)} {}

  struct Question {
    const ir::Graph& graph;
    const Device& device;
    Engine& engine;
    const Options& options;

    std::string id() const;  // the key
  };

  // Every plan belongs to the question; whether the engine takes it, load() says.
  std::optional<Tuned> find(const Question& question);
  void keep(const Question& question, const Tuned& tuned);

  // What was found is of no use after all.
  void reject(const Question& question, std::string_view why);

 private:
  std::shared_ptr<Store> store_;
};

}  // namespace lawson::plan
