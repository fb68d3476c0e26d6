extern "C" __global__ void add(float *x, float y) { x[threadIdx.x] += y; }
#ifdef MANY
#define MORE(n) extern "C" __global__ void more##n(float *x) { for (int i = 0; i < n; i++) x[i] = x[i] * n + x[n - i]; }
MORE(10) MORE(11) MORE(12) MORE(13) MORE(14) MORE(15) MORE(16) MORE(17)
#endif
