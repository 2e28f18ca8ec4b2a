// What is written to standard error for people: a line per event, the choice of an engine, and the
// summary at the end of the process. Each line is one write, so that those of several processes do
// not mix.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "diag/counters.h"
#include "diag/diag.h"

namespace lawson::diag {

// "lawson: TEXT" on standard error.
void print_line(std::string_view text) noexcept;

// Control characters as \xNN: names come from anywhere and go to terminals.
std::string printable(std::string_view text);

// "rank=0 thread=1 dev=0 MISS engine=cudnn pass=forward key=...".
std::string event_line(Event event, const Subject& subject);

// The counts as a table, then the stages' times.
std::string summary_text(const std::vector<ThreadCounts>& threads);

// Which engine answers for a graph.
struct Choice {
  std::string_view graph;  // its name
  Subject subject;         // the engine; empty: none
  std::string_view target;
  std::string_view plan;  // the engine's name of it, where one was chosen
};
struct Passed {
  std::string engine;
  std::string reason;
};
// LAWSON_DEBUG. 0: nothing is printed; 1: the choice; 2: also what was passed over and why.
int choice_level() noexcept;
void print_choice(const Choice& choice, const std::vector<Passed>& passed) noexcept;

}  // namespace lawson::diag
