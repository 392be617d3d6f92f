/* A libcuda that takes launches and runs nothing: Triton's own JIT, compiler and launcher work on it. See host_time.py. */
#include <cuda.h>
long stub_launches = 0, stub_devices[64];
CUresult cuInit(unsigned f){return 0;}
CUresult cuDeviceGetCount(int*c){*c=2;return 0;}
CUresult cuDeviceGet(CUdevice*d,int o){*d=o;return 0;}
CUresult cuCtxGetCurrent(CUcontext*c){*c=(CUcontext)1;return 0;}
CUresult cuCtxGetDevice(CUdevice*d){*d=0;return 0;}
CUresult cuCtxGetLimit(size_t*v,CUlimit l){*v=0;return 0;}
CUresult cuCtxSetCurrent(CUcontext c){return 0;}
CUresult cuCtxSetLimit(CUlimit l,size_t v){return 0;}
CUresult cuDeviceGetAttribute(int*v,CUdevice_attribute a,CUdevice d){*v=232448;return 0;}
CUresult cuDevicePrimaryCtxRetain(CUcontext*c,CUdevice d){*c=(CUcontext)1;return 0;}
CUresult cuDriverGetVersion(int*v){*v=12080;return 0;}
CUresult cuFuncGetAttribute(int*v,CUfunction_attribute a,CUfunction f){*v= a==CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK?1024:0;return 0;}
CUresult cuFuncSetAttribute(CUfunction f,CUfunction_attribute a,int v){return 0;}
CUresult cuFuncSetCacheConfig(CUfunction f,CUfunc_cache c){return 0;}
CUresult cuGetErrorString(CUresult e,const char**s){*s="stub";return 0;}
CUresult cuLaunchKernelEx(const CUlaunchConfig*c,CUfunction f,void**p,void**e){stub_launches++;return 0;}
CUresult cuModuleGetFunction(CUfunction*f,CUmodule m,const char*n){*f=(CUfunction)1;return 0;}
CUresult cuModuleLoadData(CUmodule*m,const void*i){*m=(CUmodule)1;return 0;}
CUresult cuModuleUnload(CUmodule m){return 0;}
CUresult cuPointerGetAttribute(void*d,CUpointer_attribute a,CUdeviceptr p){*(CUdeviceptr*)d=p;return 0;}
CUresult cuPointerGetAttributes(unsigned n,CUpointer_attribute*a,void**d,CUdeviceptr p){return 0;}
CUresult cuStreamIsCapturing(CUstream s,CUstreamCaptureStatus*c){*c=0;return 0;}
