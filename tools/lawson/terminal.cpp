#include "terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace lawson::cli {
namespace {

bool wants_colour(int descriptor) {
  if (isatty(descriptor) == 0 || std::getenv("NO_COLOR") != nullptr) return false;
  const char* term = std::getenv("TERM");
  return term != nullptr && std::string_view{term} != "dumb";
}

const char* code_of(Style style) {
  switch (style) {
    case Style::plain:
      return "";
    case Style::bold:
      return "\033[1m";
    case Style::dim:
      return "\033[2m";
    case Style::good:
      return "\033[32m";
    case Style::bad:
      return "\033[31m";
    case Style::warning:
      return "\033[33m";
  }
  return "";
}

bool starts_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
}

}  // namespace

std::string paint(std::string_view text, Style style) {
  static const bool colour = wants_colour(STDOUT_FILENO);
  if (!colour || style == Style::plain) return std::string{text};
  return fmt::format("{}{}\033[0m", code_of(style), text);
}

std::size_t screen_width(std::size_t most) {
  winsize size{};
  std::size_t width = 0;
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    width = size.ws_col;
  } else if (const char* columns = std::getenv("COLUMNS")) {
    const auto given = std::strtoul(columns, nullptr, 10);
    if (given > 0) width = given;
  }
  return width == 0 ? most : std::clamp<std::size_t>(width, 60, 160);
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {  // a colour takes no column
      i = std::min(text.find('m', i), text.size());
    } else if (starts_character(text[i])) {
      ++width;
    }
  }
  return width;
}

std::string shortened(std::string_view text, std::size_t width) {
  if (display_width(text) <= width) return std::string{text};
  if (width == 0) return "";
  std::size_t seen = 0;
  std::size_t end = 0;
  for (; end < text.size(); ++end) {
    if (starts_character(text[end]) && ++seen == width) break;
  }
  std::string_view kept = text.substr(0, end);
  while (!kept.empty() && kept.back() == ' ') kept.remove_suffix(1);
  return std::string{kept} + "…";
}

std::string padded(std::string_view text, std::size_t width) {
  const std::size_t have = display_width(text);
  return std::string{text} + std::string(width > have ? width - have : 0, ' ');
}

std::vector<std::string> wrapped(std::string_view text, std::size_t width) {
  std::vector<std::string> lines;
  std::string line;
  const auto flush = [&] {
    lines.push_back(line);
    line.clear();
  };
  std::size_t start = 0;
  while (start < text.size()) {
    if (text[start] == '\n') {
      flush();
      ++start;
      continue;
    }
    if (text[start] == ' ') {
      ++start;
      continue;
    }
    const std::size_t end = std::min(text.find_first_of(" \n", start), text.size());
    const std::string_view word = text.substr(start, end - start);
    if (!line.empty() && display_width(line) + 1 + display_width(word) > width) flush();
    if (!line.empty()) line += ' ';
    line += word;
    start = end;
  }
  if (!line.empty() || lines.empty()) flush();
  return lines;
}

std::string paragraph(std::string_view first, std::string_view text) {
  const std::size_t indent = display_width(first);
  const std::size_t width = screen_width();
  std::string out{first};
  bool continued = false;
  for (const std::string& line : wrapped(text, width > indent + 20 ? width - indent : 20)) {
    if (continued) out += std::string(indent, ' ');
    out += line + '\n';
    continued = true;
  }
  return out;
}

std::string superscript(std::size_t number) {
  static const char* const digits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string out;
  for (const char c : std::to_string(number)) out += digits[c - '0'];
  return out;
}

std::string counted(std::size_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < std::size(units)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string seconds_text(double seconds) {
  return seconds < 100 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} s", seconds);
}

std::string milliseconds_text(double value) {
  return value < 10 ? fmt::format("{:.4f} ms", value) : fmt::format("{:.2f} ms", value);
}

void print_out(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void print_warning(std::string_view text) {
  fmt::print(stderr, "lawson: warning: {}\n", text);
}

Progress::Progress(std::string label, std::size_t total)
    : label_{std::move(label)},
      total_{total},
      terminal_{isatty(STDERR_FILENO) != 0},
      next_draw_{terminal_ ? 0.3 : 10.0} {}

Progress::~Progress() {
  if (terminal_ && drawn_) fmt::print(stderr, "\r\033[K");
}

void Progress::step() {
  const std::lock_guard lock(mutex_);
  ++done_;
  draw();
}

void Progress::draw() {
  const double now = clock_.seconds();
  if (now < next_draw_) return;
  const std::string text = fmt::format("{} {}/{}", label_, done_, total_);
  if (terminal_) {
    fmt::print(stderr, "\r\033[K{} ({})", text, seconds_text(now));
    std::fflush(stderr);
    next_draw_ = now + 0.1;
  } else {
    fmt::print(stderr, "lawson: {} after {}\n", text, seconds_text(now));
    next_draw_ = now + 10;
  }
  drawn_ = true;
}

}  // namespace lawson::cli
