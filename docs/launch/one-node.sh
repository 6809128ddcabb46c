#!/usr/bin/env bash
# Trains on all GPUs of this machine (without one: four processes on the CPU), and goes on after a failure.
#
#   docs/launch/one-node.sh RUN_DIRECTORY [flags of memo train]
#   docs/launch/one-node.sh run1 --model 7b --seq 128k --data texts/ --tp 8 --batch 1 --offload auto
#
# python3 must be one that has memo: activate its environment, or PATH=.venv/bin:$PATH docs/launch/one-node.sh ...
# Run the same line again to go on from the newest checkpoint. Ctrl-C finishes the step and saves.
set -euo pipefail

run=${1:?usage: one-node.sh RUN_DIRECTORY [flags of memo train]}
shift
mkdir -p "$run"

ranks=$(python3 -c 'import torch; print(torch.cuda.device_count() or 4)')
if [ $# -eq 0 ]; then
  set -- --model tiny --seq 256 --dp "$ranks" --steps 20
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" --max-restarts 3 -m memo.cli.main train \
  --checkpoint-dir "$run/checkpoints" --checkpoint-every 10 --resume --metrics "$run/metrics.jsonl" "$@"
