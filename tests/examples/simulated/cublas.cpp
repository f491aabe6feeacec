// SPDX-License-Identifier: Apache-2.0
// Implements the few cuBLAS calls of train_gpt_cuda with the host's BLAS on the simulated stream.
#include <cblas.h>
#include <cublas_v2.h>

#include "simulated_cuda/enqueue.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

CBLAS_TRANSPOSE transpose_of(cublasOperation_t operation) {
  return operation == CUBLAS_OP_N ? CblasNoTrans : CblasTrans;
}

}  // namespace

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }

const char *cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_EXECUTION_FAILED";
}

// alpha and beta are read now, as in pointer mode host.
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                         int n, int k, const float *alpha, const float *a, int lda, long long step_a,
                                         const float *b, int ldb, long long step_b, const float *beta, float *c,
                                         int ldc, long long step_c, int count) {
  const auto multiply = [=, alpha = *alpha, beta = *beta] {
    for (int i = 0; i < count; ++i)
      cblas_sgemm(CblasColMajor, transpose_of(op_a), transpose_of(op_b), m, n, k, alpha, a + i * step_a, lda,
                  b + i * step_b, ldb, beta, c + i * step_c, ldc);
  };
  return simulated::enqueue(handle->stream, multiply) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                     : CUBLAS_STATUS_EXECUTION_FAILED;
}
