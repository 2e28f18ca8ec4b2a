// Shorthands for the frontend's types. Included by lowering.cpp alone, after cudnn_frontend.h.
#pragma once

#include <memory>
#include <string>

#include "base/dtype.h"
#include "engine/cudnn/fold.h"
#include "engine/cudnn/lowering.h"

namespace lawson::cudnn {

namespace fe = cudnn_frontend;

using FrontendGraph = fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using Pointwise = fe::graph::Pointwise_attributes;
using Mode = fe::PointwiseMode_t;
using Type = fe::DataType_t;

inline Type type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return Type::DOUBLE;
    case DType::f32:
      return Type::FLOAT;
    case DType::f16:
      return Type::HALF;
    case DType::bf16:
      return Type::BFLOAT16;
    case DType::f8e4m3:
      return Type::FP8_E4M3;
    case DType::f8e5m2:
      return Type::FP8_E5M2;
    case DType::f8e8m0:
      return Type::FP8_E8M0;
    case DType::f4e2m1:
      return Type::FP4_E2M1;
    case DType::i64:
      return Type::INT64;
    case DType::i32:
      return Type::INT32;
    case DType::i8:
      return Type::INT8;
    case DType::u8:
      return Type::UINT8;
    case DType::i4:
      return Type::INT4;
    case DType::boolean:
      return Type::BOOLEAN;
  }
  return Type::NOT_SET;
}

inline Dims dims_of(const Dims3& dims) {
  return {dims.begin(), dims.end()};
}

}  // namespace lawson::cudnn
