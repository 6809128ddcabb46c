#!/bin/sh
# Makes a plan, its simulated timeline and its arena, on a machine without a GPU, in about a minute.
#
#     sh examples/plan_without_gpu.sh [FOLDER]                     a 7B model at a million tokens on eight A800
#     MODEL=13b SEQ=512k GPU=h100 GPUS=8 TP=8 sh examples/plan_without_gpu.sh
#
# FOLDER (default: memo-plan) gets plan.json, timeline.html (open it in a browser) and arena.json with its picture, arena.html.
# Needs the `memo` command: pip install ., or make, whose .venv is found here.
set -eu

PATH=$(dirname "$0")/../.venv/bin:$PATH
FOLDER=${1:-memo-plan}
MODEL=${MODEL:-7b} SEQ=${SEQ:-1m} GPU=${GPU:-a800} GPUS=${GPUS:-8} TP=${TP:-8} ALPHA=${ALPHA:-0.25}
command -v memo >/dev/null || { echo "there is no memo command here; run make, or pip install . in $(dirname "$0")/.." >&2; exit 1; }
mkdir -p "$FOLDER"

# The plan: which activations of each layer are kept, moved and recomputed, and the predicted step.
memo plan --model "$MODEL" --seq "$SEQ" --gpu "$GPU" --gpus "$GPUS" --tp "$TP" -o "$FOLDER/plan.json" -f

# The same step simulated copy by copy on that machine's links, as one HTML page.
memo simulate "$FOLDER/plan.json" -o "$FOLDER/timeline.jsonl" -f
memo trace html "$FOLDER/timeline.jsonl" -o "$FOLDER/timeline.html" -f

# The allocations of one rank in such a step with a fixed alpha, recorded on tensors without bytes, and the smallest arena for it.
memo record --model "$MODEL" --seq "${RECORD_SEQ:-$SEQ}" --tp "$TP" --alpha "$ALPHA" -o "$FOLDER/allocations.csv" -f
memo pack "$FOLDER/allocations.csv" -o "$FOLDER/arena.json" --plot "$FOLDER/arena.html" -f
memo check "$FOLDER/arena.json"
echo "Open $FOLDER/timeline.html and $FOLDER/arena.html in a browser."
