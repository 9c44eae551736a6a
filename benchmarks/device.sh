#!/usr/bin/env bash
# The private step on a CUDA device, in at most 8 minutes: eager, compiled, bf16, all-ghost and auto.
#
#     benchmarks/device.sh                                   # base, then large if there is time
#     SIZES=base MICROBATCH=128 OUT=results benchmarks/device.sh
#     DEVICE=cpu SIZES=test MICROBATCH=4 ROUNDS=1 benchmarks/device.sh     # try the script itself
#
# One JSON and one Markdown file for each part lie in $OUT when it ends; a part that runs out of time
# is told, and the others stand. Of the first size everything, eager first, as compiling may take the
# longest; of further sizes the eager steps.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

DEVICE=${DEVICE:-cuda}
SIZES=${SIZES:-"base large"}
MICROBATCH=${MICROBATCH:-64}
ROUNDS=${ROUNDS:-15}
OUT=${OUT:-benchmark_device}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-470}
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

mkdir -p "$OUT" || exit 1
if [ "$DEVICE" = cuda ]; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || exit 1
fi
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)' || exit 1

num_failed=0
part() { # part NAME SIZE METHOD...: one run of step.py in the time that is left
  local name=$1 size=$2 left=$((SECONDS_IN_ALL - SECONDS))
  shift 2
  if [ "$left" -lt 20 ]; then
    echo "== $size, $name: left out, no time left"
    return
  fi
  echo "== $size, $name ($left s left)"
  timeout --kill-after=5 "$left" "$PYTHON" benchmarks/step.py --device "$DEVICE" --sizes "$size" \
    --microbatch "$MICROBATCH" --rounds "$ROUNDS" --logical-batch $((4 * MICROBATCH)) \
    --json "$OUT/$size-$name.json" --markdown "$OUT/$size-$name.md" --methods "$@"
  local code=$?
  if [ "$code" -ne 0 ]; then
    echo "== $size, $name: ended with $code (124, 137: out of time); no figures of it"
    num_failed=$((num_failed + 1))
  fi
}

first=${SIZES%% *}
part eager "$first" plain ours ours_ghost plain_bf16 ours_bf16 ours_ghost_bf16
part whole "$first" whole_plain whole_ours --no-memory
part compiled_bf16 "$first" plain_compiled_bf16 ours_compiled_bf16 --no-memory
part compiled "$first" plain_compiled ours_compiled --no-memory
for size in ${SIZES#"$first"}; do
  part eager "$size" plain ours ours_ghost plain_bf16 ours_bf16 ours_ghost_bf16 --no-memory
done

echo "== done after $SECONDS s; files in $OUT:"
ls "$OUT"
exit $((num_failed > 0))
