#!/usr/bin/env bash
# gpu_hour_prepare.sh [FOLDER [PYTHON_VERSION]]: packs into FOLDER (.gpu) all that gpu_hour.sh needs on a bare GPU machine that
# reaches no registry: the committed tree, wheels for its Python (3.12), single files of TRL and Axolotl, and gpu_hour.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.gpu}
version=${2:-3.12}
python=${PYTHON:-python3}
rm -rf "$folder" && mkdir -p "$folder/peer"

git rev-parse --short=10 HEAD > "$folder/COMMIT"
[ -z "$(git status --porcelain -uno)" ] || echo "gpu-hour-prepare: what is not committed does not travel" >&2
git archive --format=tar.gz --add-file="$folder/COMMIT" --output="$folder/memo.tgz" HEAD

download() { "$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --only-binary=:all: "$@"; }
download --constraint constraints.txt --dest "$folder" --python-version "$version" --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 \
  pulp highspy rich markdown-it-py mdurl pygments pytest pytest-timeout pluggy iniconfig packaging expecttest \
  kvikio-cu13 libkvikio-cu13 rapids-logger cuda-pathfinder
download --dest "$folder/peer" trl==1.16.0 axolotl==0.19.0
"$python" - "$folder" << 'EOF'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
for module in (
    "trl.models.activation_offloading",
    "axolotl.monkeypatch.selective_checkpointing",
    "axolotl.monkeypatch.selective_checkpointing_offload",
    "axolotl.monkeypatch.checkpoint_activation_offload",
):
    package, name = module.partition(".")[0], module.rpartition(".")[2]
    wheel = zipfile.ZipFile(next((folder / "peer").glob(f"{package}-*.whl")))
    (folder / f"{package}_{name}.py").write_bytes(wheel.read(module.replace(".", "/") + ".py"))
EOF
rm -r "$folder/peer"
cp benchmarks/gpu_hour.sh "$folder/"
du -sh "$folder"
