// Plans with dynamic shapes: fusions with a product that differ in their rows alone share compiled
// kernels, in cuDNN's kernel cache. The first of a family is compiled, the others take its kernel.
//
// Not attention: cuDNN 9.19 takes it, and gives every length the loops of the one that its kernel
// was compiled for, so that all others come out wrong (measured on an H200: docs/cudnn-notes.md).
#pragma once

#include <memory>
#include <string>

#include "engine/device.h"
#include "ir/graph.h"

namespace lawson::cudnn {

// What such plans are called among a verdict's rewrites.
inline constexpr const char* kDynamicShapes = "dynamic_shapes";

// cuDNN's cache of one family, and the lock around whatever touches it (lowering.cpp).
struct KernelFamily;
std::shared_ptr<KernelFamily> make_kernel_family();

// The family of a fusion on a device; nullptr where it has no product. The families used last are
// kept for the process.
std::shared_ptr<KernelFamily> kernel_family(const ir::Graph& fusion, const Device& device);

// All of what its kernels may depend on: everything but the number of rows and batches, of which it
// says only whether it is 1, and what it is a multiple of.
std::string family_text(const ir::Graph& fusion);

}  // namespace lawson::cudnn
