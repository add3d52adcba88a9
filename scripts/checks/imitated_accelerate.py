"""Run the tests as on a Mac's CPU, where the bits of a product's rows change with their number.

    python scripts/checks/imitated_accelerate.py --numprocesses 2 --dist loadfile

It runs on Linux with gcc. Where MLX calls Accelerate on macOS, it calls a library here that is
compiled for this run: OpenBLAS multiplies one row at once, and several in two parts, whose sizes
depend on the number of rows. Tests that are marked `linux` are left out. Arguments go to pytest.
With SPECULATIVE_T5_TEST_DEVICE=imitated the package is told that it computes on a GPU, too.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import scipy_openblas32

REPOSITORY = Path(__file__).parents[2]
SOURCE = r"""
#include <dlfcn.h>
#include <stdlib.h>
typedef void gemm(int, int, int, int, int, int, float, const float *, int, const float *, int,
                  float, float *, int);

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    static gemm *openblas; /* threads may find it twice, which does no harm */
    if (!openblas && !(openblas = (gemm *)dlsym(dlopen(OPENBLAS, RTLD_NOW), "scipy_cblas_sgemm")))
        abort();
    int first = m > 1 && order == 101 ? k * (1 + m % 3) / 4 : 0; /* 101: by rows, as MLX has it */
    if (first) {
        openblas(order, ta, tb, m, n, first, alpha, a, lda, b, ldb, beta, c, ldc);
        a += ta == 111 ? first : (size_t)first * lda; /* 111: not transposed */
        b += tb == 111 ? (size_t)first * ldb : first;
        beta = 1;
    }
    openblas(order, ta, tb, m, n, k - first, alpha, a, lda, b, ldb, beta, c, ldc);
}
"""


def main() -> int:
    library = Path(scipy_openblas32.get_lib_dir(), scipy_openblas32.get_library(fullname=True))
    with tempfile.TemporaryDirectory() as folder:
        shim = str(Path(folder, "accelerate.so"))
        command = ("gcc", "-O2", "-shared", "-fPIC", f'-DOPENBLAS="{library}"', "-xc", "-")
        subprocess.run([*command, "-o", shim, "-ldl"], input=SOURCE, text=True, check=True)
        settings = {"LD_PRELOAD": shim, "SPECULATIVE_T5_NATIVE": "0", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "not linux", *sys.argv[1:]],
            cwd=REPOSITORY,
            env=os.environ | settings,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
