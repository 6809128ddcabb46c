#!/usr/bin/env bash
# gpu_hour.sh PART: one command on a machine with a GPU, four minutes at most; PART is 1 to 6, in the order of what is not known
# yet (docs/gpu.md).
#
# It runs from the folder that `make gpu-hour-prepare` fills, beside memo.tgz, the wheels and the peers' single files, and needs
# Python with torch and numpy; models of transformers run where transformers and PEFT are. Results and logs go to $OUT. The tree
# is unpacked once; a later part on the same machine starts at once, and a mended tree is unpacked anew. Each command has its own
# limit, and the next one runs whatever became of it. Exits 3 without a GPU, 1 when a command failed or was cut off, 2 for what is
# no part.
set -u
shopt -s nullglob

if [ -z "${GPU_HOUR_SMALL:-}" ]; then
  patience=1  # times every limit
  lora8="--model llama-3-8b+lora16" whole4="--model qwen3-4b" short="--seq 32k --rounds 1" long="--seq 64k --rounds 1 --no-bits"
  deep="--model llama-3-8b+lora16 --layers 2 --seq 500k --rounds 1 --no-bits"
  model="--model 350m" host="--host 64GiB" allocator="--seq 32k --steps 12" probe="" kernels=""
  programs="--workers 4 --minutes 1.75 --shrink 20 --ranks 0 --write" classes=(--workers 6 --settings 1,0.3,0)
else  # the rehearsal: the same commands, where nothing is fast
  patience=4
  lora8="--small --model llama-3-8b+lora16" whole4="--small --model qwen3-4b"
  short="--seq 512 --rounds 1" long="--seq 1k --rounds 1 --no-bits" deep="$lora8 --seq 2k --rounds 1 --no-bits"
  model="--model tiny" host="--host 1GiB" allocator="--seq 512 --steps 2" probe="--small" kernels="--values 16k --asked 0"
  programs="--programs 10 --ranks 0 --write" classes=(--workers 1 --settings 1,0 --only LlamaForCausalLM)
  some="when_one_stream_lags or host_arena_is_exact or too_late or no_fallback or anything_but_zero or refused"
  export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} -k '$some'"
fi

part=${1:-}
here=$(cd "$(dirname "$0")" && pwd)
work=${GPU_HOUR_WORK:-/tmp/memo-hour}
python=${PYTHON:-python3}
case $part in [1-6]) ;; *) echo "gpu_hour.sh: PART is 1 to 6" >&2; exit 2 ;; esac
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

hf() {  # SECONDS ARGUMENT...: unmodified models of transformers, by memo.offload(model) and by the best flags
  if "$python" -c 'import transformers, peft' 2> /dev/null; then
    run "$1" benchmarks.gpu_bench hf "${@:2}"
  else
    echo "== benchmarks.gpu_bench hf: left out, transformers or PEFT is not installed"
  fi
}

case $part in
  1)  # the defaults at 8B and 32k beside the flags
    hf 230 $lora8 $short --ways "full; attention kept; Axolotl; defaults"
    ;;
  2)  # the same at 64k
    hf 230 $lora8 $long --ways "full; Axolotl; defaults"
    ;;
  3)  # Qwen3-4B, all of it trained, at 64k on one GPU
    hf 230 $whole4 $long --ways "full; Axolotl; alpha 0; defaults"
    ;;
  4)  # is it right, on all cores
    beside smoke 100 benchmarks.gpu_smoke
    beside swap 120 benchmarks.gpu_check swap
    beside kernels 110 benchmarks.gpu_check kernels
    beside hunt 140 tests.hunt $programs
    if "$python" -c 'import transformers' 2> /dev/null; then
      beside architectures 140 benchmarks.architectures --device cuda "${classes[@]}"
    else
      echo "== benchmarks.architectures: left out, transformers is not installed"
    fi
    together
    run 60 benchmarks.gpu_check arena  # alone: a request that cannot be met takes what memory there is before it is refused
    ;;
  5)  # the codec and the masks against a copy; the planned allocator beside torch's; the machine
    run 40 benchmarks.kernels $kernels
    run 110 benchmarks.gpu_allocator $model $allocator $host
    run 50 benchmarks.gpu_probe $probe
    ;;
  6)  # two layers of 8B at 500k tokens, all that is saved on disk
    mkdir -p "$work/disk"  # the scratch file in it has no name: nothing is left behind
    hf 230 $deep --ways "on disk" --disk "$work/disk"
    ;;
esac

printf '\npart %s: %d s' "$part" "$SECONDS"
[ ${#failed[@]} = 0 ] && echo ", every command ended well" && finish 0
printf '; failed: %s' "${failed[@]}"
echo
finish 1
