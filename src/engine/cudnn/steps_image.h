// The compiled steps.cu, embedded by the build (cmake/LawsonKernels.cmake).
#pragma once

#include <span>

namespace lawson::cudnn {

// A fat binary: machine code for several GPUs and PTX for the others. Empty in a build without.
std::span<const unsigned char> steps_image();

}  // namespace lawson::cudnn
