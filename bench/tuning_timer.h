// Times of the built configs of one computation, on random data.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tuning_buffers.h"
#include "tuning_search.h"

namespace lawson::bench {

// What was being run when a process was lost, by computation: read by the next one, which leaves it
// out.
class Journal {
 public:
  explicit Journal(std::string path);

  bool lost(const std::string& computation, const std::string& plan) const;
  void begin(const std::string& computation, const std::string& plan);
  void end(const std::string& computation, const std::string& plan);
  void write() const;
  void remove() const;

 private:
  std::string path_;
  std::map<std::string, std::set<std::string>> lost_;
};

class Timer {
 public:
  Timer(Engine& cudnn, const Device& live, Journal& journal)
      : cudnn_{cudnn}, live_{live}, journal_{journal} {}

  // The configs that ran with the right numbers, fastest first; the others have a failure. `first`:
  // the name of the one whose numbers the others have to have. An error: the CUDA context is lost.
  Result<std::vector<const Config*>> rank(const Computation& item, const std::string& first,
                                          std::vector<Config>& configs);
  bool context_works();

 private:
  Status time(const Computation& item, Config& config, Buffers& buffers, int rounds);
  void drop_wrong(const Computation& item, const std::string& first, std::vector<Config*>& ranked,
                  Buffers& buffers);

  Engine& cudnn_;
  const Device& live_;
  Journal& journal_;
};

std::string title(const Computation& item);

}  // namespace lawson::bench
