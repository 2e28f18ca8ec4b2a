#define LAWSON_CPU_NAME v3
#include "engine/cpu/kernels_body.h"
