#define LAWSON_CPU_NAME v2
#include "engine/cpu/kernels_body.h"
