#include "diag/lines.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>

#include "diag/listeners.h"
#include "diag/settings.h"

namespace lawson::diag {
namespace {

// Where there is none, "-": each word of a line has its place.
std::string word(std::string_view text) {
  return text.empty() ? "-" : printable(text);
}

std::string upper(std::string_view text) {
  std::string result{text};
  for (char& c : result) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

// Columns as wide as their widest cell; numbers to the right.
std::string table(const std::vector<std::vector<std::string>>& rows, std::size_t texts) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line = " ";
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i < texts ? fmt::format(" {:<{}}", row[i], widths[i])
                        : fmt::format(" {:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
  }
  return out;
}

std::vector<std::string> numbers(const Counts& counts) {
  std::vector<std::string> cells;
  for (const std::uint64_t count : counts.events) cells.push_back(fmt::format("{}", count));
  return cells;
}

}  // namespace

void print_line(std::string_view text) noexcept {
  detail::quietly([&] {
    const std::string line = fmt::format("lawson: {}\n", text);
    static_cast<void>(!::write(STDERR_FILENO, line.data(), line.size()));
  });
}

std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string event_line(Event event, const Subject& subject) {
  return fmt::format("rank={} pid={} thread={} dev={} {} engine={} pass={} key={}", settings().rank,
                     ::getpid(), this_thread(), device_text(subject.device),
                     upper(to_string(event)), word(subject.engine), word(subject.pass),
                     word(subject.key));
}

std::string summary_text(const std::vector<ThreadCounts>& threads) {
  std::vector<std::vector<std::string>> rows{{"thread", "dev", "engine", "pass"}};
  for (std::size_t i = 0; i < kEvents; ++i) {
    rows.front().push_back(upper(to_string(static_cast<Event>(i))));
  }
  Counts totals;
  const auto add = [&](std::vector<std::string> head, const Counts& counts) {
    for (std::string& cell : numbers(counts)) head.push_back(std::move(cell));
    rows.push_back(std::move(head));
  };
  for (const ThreadCounts& thread : threads) {
    Counts sum;
    for (const Row& row : thread.rows) sum.add(row.counts);
    totals.add(sum);
    const std::string name = thread.thread == 0 ? "ended" : fmt::format("{}", thread.thread);
    add({name, "dev=" + thread.device(), "all", "all"}, sum);
    for (const Row& row : thread.rows) {
      add({name, "dev=" + device_text(row.device), word(row.engine), word(row.pass)}, row.counts);
    }
  }
  add({"all", "", "", ""}, totals);
  std::string out = table(rows, 4);

  std::vector<std::vector<std::string>> times{{"stage", "count", "total ms", "max ms"}};
  for (std::size_t i = 0; i < kStages; ++i) {
    const StageTime& time = totals.stages[i];
    times.push_back({std::string{to_string(static_cast<Stage>(i))}, fmt::format("{}", time.count),
                     fmt::format("{:.3f}", static_cast<double>(time.total_ns) * 1e-6),
                     fmt::format("{:.3f}", static_cast<double>(time.max_ns) * 1e-6)});
  }
  return out + table(times, 1);
}

int choice_level() noexcept {
  int level = 0;
  detail::quietly([&] { level = settings().choice_level; });
  return level;
}

void print_choice(const Choice& choice, const std::vector<Passed>& passed) noexcept {
  detail::quietly([&] {
    const int level = choice_level();
    if (level == 0) return;
    const Subject& subject = choice.subject;
    std::string text = fmt::format(
        "'{}' ({}) on {}: {}", printable(choice.graph), printable(subject.pass),
        printable(choice.target),
        subject.engine.empty() ? "no engine" : fmt::format("engine={}", printable(subject.engine)));
    if (!choice.plan.empty()) text += fmt::format(" plan={}", printable(choice.plan));
    print_line(fmt::format("{} key={}", text, word(subject.key)));
    if (level < 2) return;
    for (const Passed& other : passed) {
      print_line(fmt::format("  not {}: {}", printable(other.engine), printable(other.reason)));
    }
  });
}

}  // namespace lawson::diag
