// Stands in for libcuda.so.1: launches nothing, and keeps what the last launch was given.
#include <cuda.h>
#include <string.h>

unsigned char given[65536];
int length, launches, parameters, sizes[512];

static void keep(const void *from, int bytes) {
  memcpy(given + length, from, bytes);
  length += bytes;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra) {
  unsigned first[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->sharedMemBytes, c->numAttrs};
  length = 0, ++launches;
  keep(first, sizeof(first)), keep(&c->hStream, 8), keep(&function, 8);
  for (unsigned i = 0; i < c->numAttrs; ++i) keep(&c->attrs[i].id, 4), keep(&c->attrs[i].value, 4);
  for (int i = 0; i < parameters; ++i) keep(arguments[i], sizes[i]);
  return CUDA_SUCCESS;
}

// The map is what it is made of.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
  unsigned char *out = memset(map, 0, sizeof(*map));
  unsigned char words[] = {type, rank, interleave, swizzle, promotion, fill};
  memcpy(out, &address, 8), memcpy(out + 8, words, sizeof(words));
  for (unsigned i = 0; i < rank; ++i) {
    unsigned sizes[] = {shape[i], i + 1 < rank ? strides[i] : 0, box[i], steps[i]};
    memcpy(out + 16 + 16 * i, sizes, sizeof(sizes));
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)given;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(data, &pointer, 8);
  return CUDA_SUCCESS;
}
