#!/bin/sh
# Remakes the files of this folder and what NVIDIA's cuobjdump says of them (cuobjdump.txt).
# Needs gcc and a package index; no GPU. Usage: tests/cuda/make.sh SCRATCH-FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$1
mkdir -p "$work"
python3 -m venv "$work/venv"
"$work/venv/bin/pip" -q install --no-deps nvidia-cuda-nvcc==13.5.37 nvidia-cuda-cuobjdump==13.5.37 \
  nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-nvvm==13.5.37
"$work/venv/bin/pip" -q install --no-deps --target "$work/cuda12" nvidia-cuda-nvcc-cu12==12.9.86
PATH=$(echo "$work"/venv/lib/python3*/site-packages/nvidia/cu13/bin):$PATH
ptxas12=$work/cuda12/nvidia/cuda_nvcc/bin/ptxas
chmod +x "$ptxas12"
cd "$work"
cp "$here/add.cu" .
cat > other.cu <<'EOF'
__device__ float twice(float x) { return 2 * x; }
extern "C" __global__ void other(float *x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
EOF
shared="nvcc -O1 -shared -Xcompiler -fPIC -Xlinker -s -cudart none -frandom-seed 1"
$shared -gencode arch=compute_80,code=sm_80 -gencode arch=compute_86,code=[sm_86,compute_86] add.cu -o two.so
$shared -gencode arch=compute_90a,code=[sm_90a,compute_90a] -gencode arch=compute_100f,code=[sm_100f,compute_100f] \
  -gencode arch=compute_120,code=sm_120 add.cu -o special.so
$shared -gencode arch=compute_89,code=sm_89 add.cu -o ada.so
$shared -gencode arch=compute_75,code=compute_75 add.cu -o ptx.so
$shared --compress-mode=size -gencode arch=compute_90,code=sm_90 -gencode arch=compute_80,code=[sm_80,compute_80] \
  -DMANY add.cu -o compressed.so
for name in add other; do
  nvcc -O1 -rdc=true -frandom-seed 1 -Xcompiler -fPIC -gencode arch=compute_86,code=[sm_86,compute_86] -c $name.cu \
    -o $name.o
done
nvcc -gencode arch=compute_86,code=sm_86 -Xcompiler -fPIC -dlink add.o other.o -o link.o
g++ -shared -s add.o other.o link.o -o relocatable.so
echo 'int zero(void) { return 0; }' > none.c
gcc -shared -s -fPIC none.c -o none.so
nvcc -fatbin -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=compute_90 add.cu -o both.fatbin
nvcc -ptx -arch=compute_80 add.cu -o add.ptx
for arch in sm_75 sm_90a sm_100f; do nvcc -cubin -arch=$arch add.cu -o cuda13.$arch.cubin; done
for arch in sm_52 sm_86 sm_90a sm_100a; do
  sed "s/^.version.*/.version 8.7/; s/^.target.*/.target $arch/" add.ptx > old.ptx
  "$ptxas12" -arch=$arch old.ptx -o cuda12.$arch.cubin
done
cp two.so special.so ada.so ptx.so compressed.so relocatable.so none.so both.fatbin add.ptx cuda1?.sm_*.cubin "$here"
cd "$here"
for file in *.so *.fatbin; do
  echo "== $file"
  cuobjdump "$file" 2>&1 | sed "s,$here/,," | grep -E '^(Fatbin (elf|ptx) code|arch = )|does not contain' || true
done > cuobjdump.txt
for file in *.cubin; do
  echo "== $file"
  cuobjdump --list-elf "$file"
done >> cuobjdump.txt
