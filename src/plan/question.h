// What is asked, in the form that the process's caches know: found once and kept beside what it is
// of (the handles of graphs and devices do), since canonical text and hashes cost more than the
// answer to a question that was asked before.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "base/hash.h"
#include "engine/engine.h"

namespace lawson::plan {

class KnownGraph {
 public:
  // `given` outlives this.
  explicit KnownGraph(const ir::Graph& given);
  KnownGraph(const KnownGraph&) = delete;
  KnownGraph& operator=(const KnownGraph&) = delete;

  // As ir::simplify leaves it: what is judged, compiled and run.
  const ir::Graph& graph() const { return simplified_ ? *simplified_ : given_; }
  std::string_view pass() const { return pass_; }     // engine/subject.h
  const Digest& meaning() const { return meaning_; }  // of the canonical text
  // Of the names and places that messages may tell: reasons are for those who used these words.
  const Digest& words() const { return words_; }

 private:
  const ir::Graph& given_;
  std::optional<ir::Graph> simplified_;  // where that is another one
  std::string_view pass_;
  Digest meaning_;
  Digest words_;
};

class KnownDevice {
 public:
  explicit KnownDevice(Device given);

  const Device& device() const { return device_; }
  const Digest& fingerprint() const { return fingerprint_; }

 private:
  Device device_;
  Digest fingerprint_;
};

// 128 bits of all that changes an answer, as a key has, and what a key leaves out: the live device.
struct QuestionId {
  Digest asked;
  int ordinal = -1;  // two equal GPUs of one machine have plans of their own
  bool operator==(const QuestionId&) const = default;
};

// Of a plan: whoever asks for the same computation gets the same one.
QuestionId plan_question(const KnownGraph& graph, const KnownDevice& device,
                         std::string_view engine, const Options& options);
// Of a verdict: its reasons are for those who used the same words.
QuestionId verdict_question(const KnownGraph& graph, const KnownDevice& device,
                            std::string_view engine, const Options& options);

// What is bound at run time is no part of a question: what is kept has nobody's defaults.
ir::Graph without_values(ir::Graph graph);

}  // namespace lawson::plan

template <>
struct std::hash<lawson::plan::QuestionId> {
  std::size_t operator()(const lawson::plan::QuestionId& id) const noexcept {
    return std::hash<lawson::Digest>{}(id.asked) + static_cast<std::size_t>(id.ordinal);
  }
};
