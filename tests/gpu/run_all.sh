#!/usr/bin/env bash
# Check and time the CUDA backend on this machine's GPU: tests/gpu/run_all.sh FOLDER [options of asv_bench/gpu/measure.py]
# Writes FOLDER/<device>-<date>.json. PYTHON names the interpreter (python3), RELPOS_GPU_SECONDS the time for all of it
# (520) and RELPOS_GPU_STEP_SECONDS the most that one step may take.
set -eEuo pipefail
if (($# == 0)); then
    echo "usage: $0 FOLDER [options]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The kernels that are measured are those of this checkout, installed or not.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" "$root/asv_bench/gpu/measure.py" "$@"
