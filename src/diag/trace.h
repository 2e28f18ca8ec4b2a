// A trace of one process and its workers in the Trace Event Format, which Perfetto and
// chrome://tracing open.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#pragma once

#include <cstdint>
#include <string>

#include "diag/diag.h"

namespace lawson::diag {

// What happened on one thread of one process: a span, or an event where it took no time.
struct Happening {
  std::string name;
  std::string engine;
  std::string pass;
  std::string key;
  int device = -1;
  std::int64_t begun_ns = 0;      // of the steady clock, which all processes of a machine share
  std::int64_t duration_ns = -1;  // -1: an event
  std::int64_t process = 0;
  std::int64_t thread = 0;
};

// False when one runs already.
bool start_trace();
bool tracing() noexcept;
// Ends the trace and returns the document. Spans that were not begun and ended in between are not
// in it.
std::string stop_trace();

namespace detail {
void keep(Happening happening);
}

}  // namespace lawson::diag
