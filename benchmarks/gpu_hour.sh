#!/usr/bin/env bash
# gpu_hour.sh PART: one command on a machine with a GPU, nine minutes at most; PART is 1 to 5, in this order (docs/gpu.md).
#
# It runs from the folder that `make gpu-hour-prepare` fills, beside memo.tgz, the wheels and TRL's file, and needs nothing but
# Python with torch and numpy; architectures run where transformers is. Results and logs go to $OUT. The tree is unpacked once; a
# later part on the same machine starts at once, and a mended tree is unpacked anew. Each command has its own limit, and the
# next one runs whatever became of it. Exits 3 without a GPU, 1 when a command failed or was cut off, 2 for what is no part.
set -u
shopt -s nullglob

if [ -z "${GPU_HOUR_SMALL:-}" ]; then
  patience=1  # times every limit
  model="--model 350m" larger=1.3b host="--host 64GiB" most_host="--host 88GiB" train_host=88GiB
  headline="--seq 64k --rounds 3" alphas="--seq 128k --layers 12 --rounds 1" million="--layers 8,6,4 --minutes 5"
  short="--rounds 3" length="--cap 16GiB --minutes 1" allocator="--seq 32k --steps 12" trained=64k
  long="--seq 128k --layers 12 --rounds 1" longer="--seq 256k --layers 6 --rounds 1"
  published="" probe="" kernels="" programs="--workers 4 --minutes 1.75 --shrink 20 --ranks 0 --write" classes=(--workers 6 --settings 1,0.3,0)
else  # the rehearsal: the same commands, where nothing is fast
  patience=4
  model="--model tiny" larger=tiny host="--host 1GiB" most_host="--host 1GiB" train_host=1GiB
  headline="--seq 1k --layers 12 --rounds 1" alphas="--seq 512 --layers 2 --rounds 1" million="--seq 1k --layers 2,1 --minutes 5"
  short="--seq 256 --rounds 1" length="--seq 2k --cap 64MiB --minutes 1" trained=512
  long="--seq 1k --layers 12 --rounds 1" longer="--seq 1k --layers 14 --rounds 1"
  published="--model qwen2.5-0.5b+lora4 --layers 2 --seq 64 --rounds 1" probe="--small" kernels="--values 16k --asked 0"
  programs="--programs 10 --ranks 0 --write" classes=(--workers 1 --settings 1,0 --only LlamaForCausalLM)
  allocator="--seq 512 --steps 2"
  short="$model $short" million="$model $million"
  some="when_one_stream_lags or host_arena_is_exact or too_late or no_fallback or anything_but_zero or refused"
  export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} -k '$some'"
fi

quick="keep everything; full checkpointing; memo"  # pinning for the others takes a minute each
part=${1:-}
here=$(cd "$(dirname "$0")" && pwd)
work=${GPU_HOUR_WORK:-/tmp/memo-hour}
python=${PYTHON:-python3}
case $part in [1-5]) ;; *) echo "gpu_hour.sh: PART is 1, 2, 3, 4 or 5" >&2; exit 2 ;; esac
[ -d "${OUT:-}" ] || { echo "gpu_hour.sh: OUT names no folder for results" >&2; exit 2; }
exec > >(tee "$OUT/part$part-$(date -u +%H%M%S).log") 2>&1
teed=$!

unpack() {
  local packed
  packed=$(cat "$here"/memo.tgz "$here"/*.whl "$here"/*.py | sha256sum)
  [ "$(cat "$work/unpacked" 2> /dev/null)" = "$packed" ] && return
  rm -rf "$work" && mkdir -p "$work/tree/.gpu" "$work/site" && tar xzf "$here/memo.tgz" -C "$work/tree" || return 1
  for peer in "$here"/*.py; do cp "$peer" "$work/tree/.gpu/" || return 1; done
  "$python" -c 'import sys, zipfile; [zipfile.ZipFile(wheel).extractall(sys.argv[1]) for wheel in sys.argv[2:]]' \
    "$work/site" "$here"/*.whl || return 1
  echo "$packed" > "$work/unpacked"
}

failed=() jobs=() names=() logs=()
run() {  # SECONDS MODULE ARGUMENT...
  local limit=$(($1 * patience)) begin=$SECONDS code
  shift
  printf '\n== %s (at %d s, %d s at most)\n' "$*" "$SECONDS" "$limit"
  timeout -k 5 "$limit" "$python" -m "$@"
  code=$?
  echo "-- exit $code after $((SECONDS - begin)) s"
  [ $code = 0 ] || failed+=("${*:1:2} (exit $code)")
}

beside() {  # NAME SECONDS MODULE ARGUMENT...: runs while others do; `together` waits for them and tells what they said
  local limit=$(($2 * patience)) log="$OUT/$1-$(date -u +%H%M%S).log"
  shift 2
  printf '== %s (%d s at most, beside others)\n' "$*" "$limit"
  timeout -k 5 "$limit" "$python" -m "$@" > "$log" 2>&1 &
  jobs+=($!) names+=("${*:1:2}") logs+=("$log")
}

together() {
  local each code
  for each in "${!jobs[@]}"; do
    wait "${jobs[$each]}"
    code=$?
    printf '\n== %s\n%s\n-- exit %d, at %d s\n' "${names[$each]}" "$(tail -n 40 "${logs[$each]}")" $code "$SECONDS"
    [ $code = 0 ] || failed+=("${names[$each]} (exit $code)")
  done
}

finish() {  # EXIT_CODE: the log is whole before the shell that waits for this one goes on
  exec >&- 2>&-
  wait "$teed"
  exit "$1"
}

unpack || { echo "gpu_hour.sh: could not unpack what lies in $here"; finish 1; }
cd "$work/tree" || finish 1
export PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH="$work/site"
"$python" -m benchmarks.machine || finish $?

case $part in
  1)  # is it right, on all cores; the machine; the headline beside checkpointing
    beside smoke 75 benchmarks.gpu_smoke
    beside swap 120 benchmarks.gpu_check swap
    beside kernels 110 benchmarks.gpu_check kernels
    beside hunt 150 tests.hunt $programs
    if "$python" -c 'import transformers' 2> /dev/null; then
      beside architectures 150 benchmarks.architectures --device cuda "${classes[@]}"
    else
      echo "== benchmarks.architectures: left out, transformers is not installed"
    fi
    together
    run 60 benchmarks.gpu_check arena  # alone: a request that cannot be met takes what memory there is before it is refused
    run 50 benchmarks.gpu_probe $probe
    run 190 benchmarks.gpu_bench plan $model $headline $host --ways "$quick"
    ;;
  2)  # a million tokens against checkpointing; lengths at which the link is the limit
    run 400 benchmarks.gpu_bench 1m $million $most_host
    run 120 benchmarks.gpu_bench swap $short $host
    ;;
  3)  # over alpha; the kernels; the allocator; the longest length under a cap
    run 195 benchmarks.gpu_bench alpha $model $alphas $host --ways "$quick"
    run 40 benchmarks.kernels $kernels
    run 100 benchmarks.gpu_allocator $model $allocator $host
    run 80 benchmarks.gpu_bench length $model $length $host
    ;;
  4)  # longer plans; a training run under the planned allocator
    run 160 benchmarks.gpu_bench plan $model $long $host --ways "$quick"
    run 240 benchmarks.gpu_bench plan $model $longer $most_host --ways "$quick"
    run 110 memo.cli.main train --model $larger --seq $trained --steps 6 --offload auto --host $train_host \
      --precision bf16 --planned-allocator --metrics "$OUT/train-$(date -u +%H%M%S).jsonl"
    ;;
  5)  # unmodified models of transformers by memo.offload(model) with nothing else: where time is short, the first to run
    if "$python" -c 'import transformers, peft' 2> /dev/null; then
      run 210 benchmarks.gpu_bench defaults --model llama-3-8b+lora16 --seq 32k $published
      run 100 benchmarks.gpu_bench defaults --model qwen3-0.6b --seq 32k $published
      run 210 benchmarks.gpu_bench defaults --model llama-3-8b+lora16 --seq 64k --rounds 1 --ways "full; defaults" $published
    else
      echo "== benchmarks.gpu_bench defaults: left out, transformers or PEFT is not installed"
    fi
    ;;
esac

printf '\npart %s: %d s' "$part" "$SECONDS"
[ ${#failed[@]} = 0 ] && echo ", every command ended well" && finish 0
printf '; failed: %s' "${failed[@]}"
echo
finish 1
