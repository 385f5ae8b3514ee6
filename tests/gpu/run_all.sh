#!/usr/bin/env bash
# Check and time the CUDA backend on this machine's GPU: tests/gpu/run_all.sh [options of asv_bench/gpu.py]
# PYTHON names the interpreter (python3). What fails ends it.
set -eEuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
# The kernels that are measured are those of this checkout, installed or not.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

alone=tests/gpu/test_gpu_memory.py
RELPOS_GPU=required "$python" -m pytest tests/cuda tests/gpu --ignore="$alone"
# It fills the device's memory.
RELPOS_GPU=required "$python" -m pytest -n 0 "$alone"

sanitizer=$(command -v compute-sanitizer || compgen -G "/usr/local/cuda*/bin/compute-sanitizer" | tail -n 1 || true)
if [[ -n $sanitizer ]]; then
    for tool in memcheck racecheck; do
        "$sanitizer" --tool "$tool" --error-exitcode 99 --target-processes all \
            "$python" asv_bench/gpu.py --tiny --rounds 0
    done
else
    echo "!!!! compute-sanitizer is neither on the path nor beside CUDA: races were not looked for." >&2
fi
exec "$python" asv_bench/gpu.py "$@"
