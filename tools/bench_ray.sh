#!/usr/bin/env bash
# Puts PyPI's Ray, a peer of bench_actors, into a virtual environment of its own, and prints the path of its Python. A second run
# does nothing.
#   tools/bench_ray.sh            install: 80 MB are downloaded, 300 MB of disk taken
#   tools/bench_ray.sh --python   only print the path, or say why there is none (exit code 1)
# The environment is ${XDG_CACHE_HOME:-~/.cache}/gtrain/ray-VERSION; remove it to be rid of it.
set -euo pipefail
version=2.60.0

say() { echo "bench_ray: $*" >&2; }
folder=${XDG_CACHE_HOME:-$HOME/.cache}/gtrain/ray-$version
case "${1:-}" in
  "") ;;
  --python)
    if [ ! -x "$folder/bin/python" ]; then say "no ray $version in $folder: run tools/bench_ray.sh"; exit 1; fi
    echo "$folder/bin/python"
    exit 0 ;;
  *) echo "usage: tools/bench_ray.sh [--python]" >&2; exit 2 ;;
esac

if [ ! -x "$folder/bin/python" ]; then
  mkdir -p "$(dirname "$folder")"
  # Under its name only once it works: an environment that was cut off half-way is made anew.
  half=$folder.half
  rm -rf "$half"
  trap 'rm -rf "$half"' EXIT
  python3 -m venv "$half" || { say "python3 -m venv failed: apt-get install python3-venv"; exit 1; }
  "$half/bin/pip" install --quiet --progress-bar off --no-cache-dir "ray==$version" ||
    { say "pip could not install ray $version (PyPI may have none for $(python3 --version)): see above; bench_actors does without it"; exit 1; }
  "$half/bin/python" -c "import ray" || { say "ray $version was installed but cannot be loaded: see above"; exit 1; }
  mv -T "$half" "$folder"
fi
echo "$folder/bin/python"
