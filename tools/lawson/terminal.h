// What goes to the person: colours on a terminal only, text as wide as the screen, progress on
// standard error.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace lawson::cli {

enum class Style { plain, bold, dim, good, bad, warning };

// `text` in the style when standard output is a terminal that wants colours, else as it is.
std::string paint(std::string_view text, Style style);

// Columns of the terminal behind standard output, else COLUMNS; where there is neither, 100 for
// text that is wrapped, and `most` for what would have to be cut.
std::size_t screen_width(std::size_t most = 100);

// Columns that UTF-8 text of single-width characters takes, colours not counted.
std::size_t display_width(std::string_view text);
// Cut to `width` columns, the last of them "…" when something was cut off.
std::string shortened(std::string_view text, std::size_t width);
std::string padded(std::string_view text, std::size_t width);
// Lines of at most `width` columns, broken at spaces; a longer word keeps its line.
std::vector<std::string> wrapped(std::string_view text, std::size_t width);

// Text wrapped to the screen: the first line starts with `first`, the others are indented as far.
std::string paragraph(std::string_view first, std::string_view text);

std::string superscript(std::size_t number);
// "1 plan", "2 plans"
std::string counted(std::size_t count, std::string_view noun);
std::string bytes_text(double bytes);         // "81.9 kB"
std::string seconds_text(double seconds);     // "12.3 s"
std::string milliseconds_text(double value);  // "0.034 ms"

void print_out(std::string_view text);      // standard output
void print_warning(std::string_view text);  // "lawson: warning: ..." on standard error

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// A counter on standard error: redrawn in place on a terminal; elsewhere a line now and then, and
// only when the work takes long. Thread-safe.
class Progress {
 public:
  Progress(std::string label, std::size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step();

 private:
  void draw();

  std::mutex mutex_;
  std::string label_;
  std::size_t total_;
  std::size_t done_ = 0;
  bool terminal_;
  bool drawn_ = false;
  Stopwatch clock_;
  double next_draw_;  // seconds since the start
};

}  // namespace lawson::cli
