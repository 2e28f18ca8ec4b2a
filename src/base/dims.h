// Shapes and strides, in elements. All arithmetic on untrusted dims is overflow-checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lawson {

using Dims = std::vector<std::int64_t>;

inline constexpr int kMaxRank = 8;
// Largest size of one dim and largest element count of one tensor that specs may ask for.
inline constexpr std::int64_t kMaxDim = std::int64_t{1} << 40;
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 46;

std::string to_string(const Dims& dims);  // "[2, 16, 16]"

// Product of the dims; nullopt on a negative dim or overflow of int64.
std::optional<std::int64_t> element_count(const Dims& shape);

// Row-major strides: the last dim is contiguous; a dim of size 0 counts as 1.
Dims contiguous_strides(const Dims& shape);

// Elements from the first to one past the last that (shape, strides) touches; 0 when empty;
// nullopt on overflow or a negative stride.
std::optional<std::int64_t> storage_extent(const Dims& shape, const Dims& strides);

// NumPy broadcasting of two shapes; nullopt when they do not match.
std::optional<Dims> broadcast_shape(const Dims& a, const Dims& b);

std::int64_t offset_of(const Dims& index, const Dims& strides);

// Steps `index` to the next position of `shape` in row-major order; false after the last.
bool next_index(Dims& index, const Dims& shape);

}  // namespace lawson
