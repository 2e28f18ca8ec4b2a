// NumPy's array files (format 1.0 and 2.0), for tensors of any element type: types that NumPy does
// not have travel as bit patterns, bf16 as uint16, FP8 as uint8, 4-bit types as one byte each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <lawson/lawson.h>

namespace lawson::cli {

struct Array {
  std::string descr;  // NumPy's type string: "<f4", "|u1", ...
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;  // contiguous, row-major
};

void write_npy(const std::string& path, const Array& array);
// Anything that is not such a file, cut short or in Fortran order, is a bad input. At most
// `max_bytes` of data are read.
Array read_npy(const std::string& path, std::size_t max_bytes);

// NumPy's type string for a dtype of the spec; empty when it is not known.
std::string npy_type(const std::string& dtype);

// The elements of a tensor in logical order, from its buffer with strides, and back.
Array array_of(const lawson_tensor_info& tensor, const void* buffer);
void fill_tensor(const lawson_tensor_info& tensor, void* buffer, const Array& array);

std::vector<std::int64_t> shape_of(const lawson_tensor_info& tensor);
std::string shape_text(const std::vector<std::int64_t>& shape);  // "[2, 16]"

}  // namespace lawson::cli
