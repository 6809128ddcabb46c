// Driver functions that torch needs before its first operator and kvikio in its compatibility mode, by means of the emulated runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>

namespace {
void* runtime(const char* name) {
  static void* library = dlopen("libcudart.so.13", RTLD_NOLOAD | RTLD_LAZY);
  return dlsym(library, name);
}
template <typename... Given>
CUresult asked(cudaError_t (*)(Given...), const char* name, Given... given) {
  return static_cast<CUresult>(reinterpret_cast<cudaError_t (*)(Given...)>(runtime(name))(given...));
}
#define RUNTIME(function, ...) asked(&function, #function, __VA_ARGS__)
}  // namespace

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { *value = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* d, int) { *d = 0; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* c) { static int context; *c = reinterpret_cast<CUcontext>(&context); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** s) { *s = "CUDA_ERROR_EMULATED"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** s) { *s = "an error of the emulated driver"; return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { return cuCtxGetCurrent(c); }
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext* c) { return c ? cuCtxGetCurrent(c) : CUDA_SUCCESS; }
CUresult cuCtxCreate_v4(CUcontext* c, CUctxCreateParams*, unsigned, CUdevice) { return cuCtxGetCurrent(c); }
CUresult cuCtxDestroy(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* d) { *d = 0; return CUDA_SUCCESS; }
CUresult cuMemHostAlloc(void** p, size_t n, unsigned flags) { return RUNTIME(cudaHostAlloc, p, n, flags); }
CUresult cuMemFreeHost(void* p) { return RUNTIME(cudaFreeHost, p); }
CUresult cuMemHostRegister(void* p, size_t n, unsigned flags) { return RUNTIME(cudaHostRegister, p, n, flags); }
CUresult cuMemHostUnregister(void* p) { return RUNTIME(cudaHostUnregister, p); }
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t n, CUstream s) {
  return RUNTIME(cudaMemcpyAsync, reinterpret_cast<void*>(to), from, n, cudaMemcpyHostToDevice, s);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t n, CUstream s) {
  return RUNTIME(cudaMemcpyAsync, to, reinterpret_cast<const void*>(from), n, cudaMemcpyDeviceToHost, s);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) {
  return RUNTIME(cudaMemcpyAsync, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), n, cudaMemcpyDefault, s);
}
CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* n, size_t count, CUmemcpyAttributes*, size_t*, size_t, CUstream s) {
  CUresult error = CUDA_SUCCESS;
  for (size_t i = 0; i < count && !error; i++) error = cuMemcpyAsync(to[i], from[i], n[i], s);
  return error;
}
CUresult cuLaunchHostFunc(CUstream s, CUhostFn function, void* data) { return RUNTIME(cudaLaunchHostFunc, s, function, data); }
CUresult cuStreamCreate(CUstream* s, unsigned flags) { return RUNTIME(cudaStreamCreateWithFlags, s, flags); }
CUresult cuStreamSynchronize(CUstream s) { return RUNTIME(cudaStreamSynchronize, s); }
CUresult cuStreamDestroy(CUstream s) { return RUNTIME(cudaStreamDestroy, s); }
CUresult cuEventCreate(CUevent* e, unsigned flags) { return RUNTIME(cudaEventCreateWithFlags, e, flags); }
CUresult cuEventRecord(CUevent e, CUstream s) { return RUNTIME(cudaEventRecord, e, s); }
CUresult cuEventQuery(CUevent e) { return RUNTIME(cudaEventQuery, e); }
CUresult cuEventSynchronize(CUevent e) { return RUNTIME(cudaEventSynchronize, e); }
CUresult cuEventDestroy(CUevent e) { return RUNTIME(cudaEventDestroy, e); }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes found;
  CUresult error = RUNTIME(cudaPointerGetAttributes, &found, reinterpret_cast<const void*>(pointer));
  if (error || found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return cuCtxGetCurrent(static_cast<CUcontext*>(value));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(value) = found.type; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = 0; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = pointer; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], attributes[i], pointer);
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  return reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr)>(runtime("emulated_cuda_range"))(base, bytes, pointer);
}
}
