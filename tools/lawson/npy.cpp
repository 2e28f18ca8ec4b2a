#include "npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <span>

#include "api.h"

namespace lawson::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeader = 4096;

std::size_t item_size(std::string_view descr) {
  return descr.size() == 3 ? static_cast<std::size_t>(descr[2] - '0') : 0;
}

bool is_nibble(const lawson_tensor_info& tensor) {
  const std::string_view dtype = tensor.dtype;
  return dtype == "i4" || dtype == "f4e2m1";
}

std::string shape_tuple(const std::vector<std::int64_t>& shape) {
  return fmt::format("({}{})", fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
}

std::size_t element_count(std::span<const std::int64_t> shape) {
  std::size_t count = 1;
  for (const std::int64_t dim : shape) count *= static_cast<std::size_t>(dim);
  return count;
}

// Calls visit(element offset in the buffer) in logical order.
template <typename F>
void for_each_element(const lawson_tensor_info& tensor, F visit) {
  const auto rank = static_cast<std::size_t>(tensor.rank);
  const std::size_t count = element_count({tensor.shape, rank});
  std::array<std::int64_t, LAWSON_MAX_RANK> index{};
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < count; ++i) {
    visit(offset);
    for (std::size_t axis = rank; axis-- > 0;) {
      offset += tensor.strides[axis];
      if (++index[axis] < tensor.shape[axis]) break;
      offset -= index[axis] * tensor.strides[axis];
      index[axis] = 0;
    }
  }
}

// What follows `'name':` in the header's dict, without leading spaces.
std::string_view header_value(std::string_view header, std::string_view name) {
  const std::string quoted = fmt::format("'{}':", name);
  const std::size_t start = header.find(quoted);
  if (start == std::string_view::npos) return {};
  header.remove_prefix(start + quoted.size());
  while (!header.empty() && header.front() == ' ') header.remove_prefix(1);
  return header;
}

std::vector<std::int64_t> parse_shape(std::string_view text, const std::string& path) {
  std::vector<std::int64_t> shape;
  const auto bad = [&] { return bad_input(path + ": the header's shape cannot be read"); };
  if (text.empty() || text.front() != '(') throw bad();
  const std::size_t end = text.find(')');
  if (end == std::string_view::npos) throw bad();
  std::int64_t number = -1;
  for (const char c : text.substr(1, end - 1)) {
    if (c >= '0' && c <= '9') {
      number = (number < 0 ? 0 : number) * 10 + (c - '0');
      if (number > (std::int64_t{1} << 46)) throw bad();
    } else if (c == ',' && number >= 0) {
      shape.push_back(number);
      number = -1;
    } else if (c != ' ') {
      throw bad();
    }
  }
  if (number >= 0) shape.push_back(number);
  return shape;
}

}  // namespace

std::string npy_type(const std::string& dtype) {
  static const std::map<std::string, std::string> types{
      {"f64", "<f8"},    {"f32", "<f4"},    {"f16", "<f2"},    {"bf16", "<u2"}, {"f8e4m3", "|u1"},
      {"f8e5m2", "|u1"}, {"f8e8m0", "|u1"}, {"f4e2m1", "|u1"}, {"i64", "<i8"},  {"i32", "<i4"},
      {"i8", "|i1"},     {"u8", "|u1"},     {"i4", "|i1"},     {"bool", "|b1"}};
  const auto it = types.find(dtype);
  return it == types.end() ? "" : it->second;
}

void write_npy(const std::string& path, const Array& array) {
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}",
                                   array.descr, shape_tuple(array.shape));
  // The data starts at a multiple of 64 bytes.
  const std::size_t prefix = kMagic.size() + 4;
  header.append(63 - (prefix + header.size()) % 64, ' ');
  header += '\n';
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << kMagic << '\x01' << '\x00' << static_cast<char>(header.size() & 0xFFU)
       << static_cast<char>(header.size() >> 8U) << header;
  file.write(reinterpret_cast<const char*>(array.data.data()),
             static_cast<std::streamsize>(array.data.size()));
  file.close();
  if (!file) throw Failure("io", kExitEnvironment, path + ": cannot be written");
}

Array read_npy(const std::string& path, std::size_t max_bytes) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw bad_input(fmt::format("{}: cannot be opened ({})", path, std::strerror(errno)));
  std::array<char, 8> start{};
  file.read(start.data(), start.size());
  if (!file || std::string_view(start.data(), kMagic.size()) != kMagic) {
    throw bad_input(path + ": is not a .npy file");
  }
  std::array<unsigned char, 4> size_bytes{};
  const int size_size = start[6] == 1 ? 2 : 4;
  file.read(reinterpret_cast<char*>(size_bytes.data()), size_size);
  std::size_t header_size = 0;
  for (std::size_t i = 0; i < 4; ++i) header_size |= std::size_t{size_bytes[i]} << (8 * i);
  if (!file || header_size > kMaxHeader) throw bad_input(path + ": its header cannot be read");
  std::string header(header_size, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_size));
  if (!file) throw bad_input(path + ": is cut short in its header");

  Array array;
  const std::string_view descr = header_value(header, "descr");
  if (descr.size() >= 5 && descr[0] == '\'' && descr[4] == '\'') array.descr = descr.substr(1, 3);
  if (item_size(array.descr) == 0 || item_size(array.descr) > 8) {
    throw bad_input(fmt::format("{}: element type {} is not one of the types that are saved", path,
                                descr.substr(0, descr.find(','))));
  }
  if (!header_value(header, "fortran_order").starts_with("False")) {
    throw bad_input(path + ": is in Fortran order; expected C order");
  }
  array.shape = parse_shape(header_value(header, "shape"), path);
  std::size_t bytes = item_size(array.descr);
  for (const std::int64_t dim : array.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(dim), &bytes)) bytes = SIZE_MAX;
  }
  if (bytes > max_bytes) {
    throw bad_input(
        fmt::format("{}: shape {} is larger than expected", path, shape_text(array.shape)));
  }
  const auto wrong_size = [&] {
    return bad_input(fmt::format("{}: does not have the {} bytes of data that its shape {} needs",
                                 path, bytes, shape_text(array.shape)));
  };
  // Before memory is taken for what a header only says.
  const std::streamoff start_of_data = file.tellg();
  const std::streamoff end = file.seekg(0, std::ios::end).tellg();
  if (end < start_of_data || static_cast<std::size_t>(end - start_of_data) != bytes) {
    throw wrong_size();
  }
  file.seekg(start_of_data);
  array.data.resize(bytes);
  file.read(reinterpret_cast<char*>(array.data.data()), static_cast<std::streamsize>(bytes));
  if (static_cast<std::size_t>(file.gcount()) != bytes) throw wrong_size();
  return array;
}

std::vector<std::int64_t> shape_of(const lawson_tensor_info& tensor) {
  return {tensor.shape, tensor.shape + tensor.rank};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Array array_of(const lawson_tensor_info& tensor, const void* buffer) {
  Array array{npy_type(tensor.dtype), shape_of(tensor), {}};
  const std::size_t size = item_size(array.descr);
  array.data.resize(element_count(array.shape) * size);
  const auto* bytes = static_cast<const std::byte*>(buffer);
  std::byte* out = array.data.data();
  const bool is_signed = std::string_view{tensor.dtype} == "i4";
  for_each_element(tensor, [&](std::int64_t offset) {
    if (is_nibble(tensor)) {
      const auto pair = std::to_integer<unsigned>(bytes[offset / 2]);
      unsigned value = (offset % 2 == 0 ? pair : pair >> 4U) & 0xFU;
      if (is_signed && value >= 8) value |= 0xF0U;
      *out = std::byte{static_cast<unsigned char>(value)};
    } else {
      std::memcpy(out, bytes + static_cast<std::size_t>(offset) * size, size);
    }
    out += size;
  });
  return array;
}

void fill_tensor(const lawson_tensor_info& tensor, void* buffer, const Array& array) {
  const std::size_t size = item_size(array.descr);
  auto* bytes = static_cast<std::byte*>(buffer);
  const std::byte* in = array.data.data();
  for_each_element(tensor, [&](std::int64_t offset) {
    if (is_nibble(tensor)) {
      const auto value = std::to_integer<unsigned>(*in) & 0xFU;
      const auto pair = std::to_integer<unsigned>(bytes[offset / 2]);
      const unsigned joined =
          offset % 2 == 0 ? (pair & 0xF0U) | value : (pair & 0x0FU) | (value << 4U);
      bytes[offset / 2] = std::byte{static_cast<unsigned char>(joined)};
    } else {
      std::memcpy(bytes + static_cast<std::size_t>(offset) * size, in, size);
    }
    in += size;
  });
}

}  // namespace lawson::cli
