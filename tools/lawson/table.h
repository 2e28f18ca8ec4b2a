// A table of text cells, aligned by display width, in at most the screen's columns; whole where the
// output is a file or a pipe.
#pragma once

#include <string>
#include <vector>

#include "terminal.h"

namespace lawson::cli {

struct Cell {
  std::string text;
  Style style = Style::plain;
};

class Table {
 public:
  enum class Align { left, right };

  // At most one column is elastic: it is shortened until the table fits, and left out when fewer
  // than 8 columns would remain.
  void column(std::string title, Align align = Align::left, bool elastic = false);
  void row(std::vector<Cell> cells);
  void section(std::string title, std::string detail = "");  // a line across the table

  std::string text() const;

 private:
  struct Column {
    std::string title;
    Align align;
    bool elastic;
  };
  struct Row {
    std::vector<Cell> cells;
    std::string section;
    std::string detail;
  };
  std::vector<std::size_t> widths() const;
  std::string line(const std::vector<Cell>& cells, const std::vector<std::size_t>& widths) const;

  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace lawson::cli
