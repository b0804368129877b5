#!/usr/bin/env bash
# Puts PyPI's torch, whose distributed checkpoints are a peer of bench_checkpoint, and torchft, a peer of
# bench_elastic, into a virtual environment of their own, and prints the path of its Python. A second run does nothing.
#   tools/bench_torch.sh            install: 3 GB are downloaded, 5.4 GB of disk taken; PyPI's only build for
#                                   x86-64 brings CUDA's libraries, which it cannot be loaded without
#   tools/bench_torch.sh --python   only print the path, or say why there is none (exit code 1)
# The environment is ${XDG_CACHE_HOME:-~/.cache}/gtrain/torch-VERSION; remove it to be rid of it.
set -euo pipefail
version=2.15.0 torchft=0.2.0

say() { echo "bench_torch: $*" >&2; }
folder=${XDG_CACHE_HOME:-$HOME/.cache}/gtrain/torch-$version
case "${1:-}" in
  "") ;;
  --python)
    if [ ! -x "$folder/bin/python" ]; then say "no torch $version in $folder: run tools/bench_torch.sh"; exit 1; fi
    echo "$folder/bin/python"
    exit 0 ;;
  *) echo "usage: tools/bench_torch.sh [--python]" >&2; exit 2 ;;
esac

if [ ! -x "$folder/bin/python" ]; then
  mkdir -p "$(dirname "$folder")"
  # Under its name only once it works: an environment that was cut off half-way is made anew.
  half=$folder.half
  rm -rf "$half"
  trap 'rm -rf "$half"' EXIT
  python3 -m venv "$half" || { say "python3 -m venv failed: apt-get install python3-venv"; exit 1; }
  "$half/bin/pip" install --quiet --progress-bar off --no-cache-dir "torch==$version" "torchft==$torchft" numpy ||
    { say "pip could not install torch $version: see above; bench_checkpoint does without it"; exit 1; }
  "$half/bin/python" -c "import torch.distributed.checkpoint" ||
    { say "torch $version was installed but cannot be loaded: see above"; exit 1; }
  mv -T "$half" "$folder"
fi
echo "$folder/bin/python"
