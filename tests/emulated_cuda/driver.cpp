// The little of the driver that torch asks for before its first operator.
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuDeviceGetCount(int* n) { *n = 1; return 0; }
int cuDeviceGetAttribute(int* value, int, int) { *value = 1; return 0; }
int cuDeviceGet(int* d, int) { *d = 0; return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void** c) { static int context; *c = &context; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuGetErrorString(int, const char** s) { *s = "an error of the emulated driver"; return 0; }
}
