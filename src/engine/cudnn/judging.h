// Does cuDNN take a graph: lowering, rewrites in turn, heuristics and support checks; and what was
// said against it. Nothing is compiled here.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/cudnn/loader.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/recent.h"
#include "engine/engine.h"

namespace lawson::cudnn {

// The name of the only plan of a graph whose results have no elements.
inline constexpr const char* kNothing = "nothing_to_do";

// A graph that cuDNN accepted: what is compiled is the very object that was judged, or one that was
// made in the same way.
struct Judged {
  std::mutex mutex;                     // of what is not const
  std::unique_ptr<Lowered> lowered;     // null: there is nothing to do
  std::vector<std::string> plan_names;  // as the heuristics listed them
  // Engine configs in order, once somebody asked: those to be tried where none is named (the first
  // `from_table` of them are the tuning table's, which cuDNN may refuse), and all that it takes.
  std::vector<std::string> preferred;
  std::size_t from_table = 0;
  std::string basis;  // of the table's
  std::vector<std::string> all;
  // Another object like `lowered`, not judged yet; and of the turned graph (turned.h), where there
  // is one.
  using Lower = std::function<Result<std::unique_ptr<Lowered>>()>;
  Lower again;
  Lower again_turned;
  std::unique_ptr<Lowered> turned;  // judged, once a plan of it was asked for
  bool turned_refused = false;

  std::vector<std::string> rewrites() const {
    return lowered ? lowered->rewrites() : std::vector<std::string>{};
  }
};

// What judging came to: the graph, or a verdict against it.
struct Judgement {
  std::shared_ptr<Judged> judged;
  Decision decision = Decision::supported;
  std::vector<Reason> reasons;
};

// Remembers the graphs judged last, by key.
class Judge {
 public:
  Result<Judgement> judge(const ir::Graph& graph, const Device& device, const Options& options,
                          const std::string& key, const Libraries& found);

  // The judged graph, or "unsupported" with the reasons.
  Result<std::shared_ptr<Judged>> accepted(const ir::Graph& graph, const Device& device,
                                           const Options& options, const std::string& key,
                                           const Libraries& found);

 private:
  Recent<Judged> judged_{64};  // by key
};

}  // namespace lawson::cudnn
