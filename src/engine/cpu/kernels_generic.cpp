#define LAWSON_CPU_NAME generic
#include "engine/cpu/kernels_body.h"
