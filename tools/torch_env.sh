#!/usr/bin/env bash
# A virtual environment with what examples/torch/requirements.txt names, from PyPI, made once in the user's cache; prints its
# Python. Its name has the hash of that file, so another one makes another environment.
set -euo pipefail

requirements=$(dirname "$0")/../examples/torch/requirements.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gtrain
folder=$cache/torch-$(sha256sum "$requirements" | cut -c1-12)

mkdir -p "$cache"
exec 9>"$folder.lock"
flock 9
if [ ! -e "$folder/whole" ]; then
  echo "torch_env: installing $(grep -v '^#' "$requirements" | tr '\n' ' ')from PyPI into $folder: 6 GB" >&2
  rm -rf "$folder"
  /usr/bin/python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet --no-cache-dir --requirement "$requirements" >&2
  touch "$folder/whole"
fi
echo "$folder/bin/python"
