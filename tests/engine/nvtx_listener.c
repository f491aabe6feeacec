/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tool as NVTX loads it (NVTX_INJECTION64_PATH): writes what it is told to the file that NVTX_LISTENER_LOG names, a
 * line "push DOMAIN: MESSAGE" or "pop" each.
 */
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *lines;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static nvtxDomainHandle_t NVTX_API create_domain(const char *name) {
  char *copy = malloc(strlen(name) + 1);
  return copy ? (nvtxDomainHandle_t)(void *)strcpy(copy, name) : NULL;
}

static int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes) {
  pthread_mutex_lock(&mutex);
  fprintf(lines, "push %s: %s\n", (const char *)(const void *)domain, attributes->message.ascii);
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int NVTX_API pop(nvtxDomainHandle_t domain) {
  (void)domain;
  pthread_mutex_lock(&mutex);
  fprintf(lines, "pop\n");
  pthread_mutex_unlock(&mutex);
  return 0;
}

int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table);
int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table = NULL;
  unsigned int size = 0;
  const char *path = getenv("NVTX_LISTENER_LOG");
  lines = path ? fopen(path, "w") : NULL;
  if (!lines || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
