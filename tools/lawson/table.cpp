#include "table.h"

#include <algorithm>
#include <numeric>

namespace lawson::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kIndent = 2;
constexpr std::size_t kLeastElastic = 8;

}  // namespace

void Table::column(std::string title, Align align, bool elastic) {
  columns_.push_back({std::move(title), align, elastic});
}

void Table::row(std::vector<Cell> cells) {
  rows_.push_back({std::move(cells), "", ""});
}

void Table::section(std::string title, std::string detail) {
  rows_.push_back({{}, std::move(title), std::move(detail)});
}

// 0: the column is left out.
std::vector<std::size_t> Table::widths() const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(display_width(column.title));
  for (const Row& row : rows_) {
    for (std::size_t i = 0; i < row.cells.size(); ++i) {
      widths[i] = std::max(widths[i], display_width(row.cells[i].text));
    }
  }
  const std::size_t total =
      std::accumulate(widths.begin(), widths.end(), kIndent + kGap * (widths.size() - 1));
  const std::size_t screen = screen_width(total);
  if (total <= screen) return widths;
  const std::size_t excess = total - screen;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    if (!columns_[i].elastic) continue;
    widths[i] = widths[i] >= excess + kLeastElastic ? widths[i] - excess : 0;
  }
  return widths;
}

std::string Table::line(const std::vector<Cell>& cells,
                        const std::vector<std::size_t>& widths) const {
  std::string out;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    if (widths[i] == 0) continue;
    const Cell cell = i < cells.size() ? cells[i] : Cell{};
    const std::string text = shortened(cell.text, widths[i]);
    const std::string space(widths[i] - display_width(text), ' ');
    out += std::string(out.empty() ? kIndent : kGap, ' ');
    const std::string painted = paint(text, cell.style);
    out += columns_[i].align == Align::right ? space + painted : painted + space;
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out + '\n';
}

std::string Table::text() const {
  const std::vector<std::size_t> widths = this->widths();
  std::vector<Cell> titles;
  for (const Column& column : columns_) titles.push_back({column.title, Style::dim});
  std::string out = line(titles, widths);
  bool first = true;
  for (const Row& row : rows_) {
    if (row.section.empty()) {
      out += line(row.cells, widths);
    } else {
      if (!first) out += '\n';
      out += paint(row.section, Style::bold);
      if (!row.detail.empty()) out += "  " + paint(row.detail, Style::dim);
      out += '\n';
    }
    first = false;
  }
  return out;
}

}  // namespace lawson::cli
