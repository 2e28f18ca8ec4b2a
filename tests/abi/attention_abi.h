/* The attention part of abi_test. */
#ifndef LAWSON_TESTS_ATTENTION_ABI_H_
#define LAWSON_TESTS_ATTENTION_ABI_H_

#include <stddef.h>

typedef void (*AbiFunction)(void);
extern AbiFunction const kAttentionFunctions[];
extern const size_t kAttentionFunctionCount;

void attention_layout(void);

#endif
