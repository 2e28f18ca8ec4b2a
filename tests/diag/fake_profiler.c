/* What a profiler's injection library does, in small: a line on standard output for each range. */
#include <nvtx3/nvToolsExt.h>

#include <stdio.h>
#include <stdlib.h>

static int domain;

static nvtxDomainHandle_t create(const char* name) {
  printf("domain %s\n", name);
  return (nvtxDomainHandle_t)&domain;
}

static int push(nvtxDomainHandle_t handle, const nvtxEventAttributes_t* attributes) {
  printf("push %d %s\n", (void*)handle == (void*)&domain, attributes->message.ascii);
  return 0;
}

static int pop(nvtxDomainHandle_t handle) {
  printf("pop %d\n", (void*)handle == (void*)&domain);
  return 0;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const NvtxExportTableCallbacks* const callbacks =
      (const NvtxExportTableCallbacks*)get_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table = NULL;
  unsigned int size = 0;
  if (callbacks == NULL ||
      !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) {
    return 0;
  }
  *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
