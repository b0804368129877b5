#!/usr/bin/env bash
# tools/wheel.sh BUILD FOLDER: makes FOLDER/gtrain-*.whl of the Python package and of what BUILD has: the programs, which pip
# puts into bin, and libgtrain.so with its modules, into lib, where both look for them. Needs no network.
set -euo pipefail

build=$1 folder=$2
cd "$(dirname "$0")/.."
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
mkdir "$staged/bin" "$staged/lib"
cp -r python/gtrain python/setup.py python/pyproject.toml "$staged"
rm -rf "$staged/gtrain/__pycache__"
"$build/bin/gtrain" --version | cut -d' ' -f2 >"$staged/VERSION"

# Names of functions stay, for backtraces; what only a debugger reads is nine tenths of the size.
strip_into() { strip --strip-debug -o "$1/$(basename "$2")" "$2"; }
for program in gtrain gtrain-keeper gtrain-writer gtrain-bench; do strip_into "$staged/bin" "$build/bin/$program"; done
for library in "$build"/lib/libgtrain.so "$build"/lib/libgtrain_*.so; do strip_into "$staged/lib" "$library"; done

mkdir -p "$folder"
rm -f "$folder"/gtrain-*.whl
/usr/bin/python3 -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir "$folder" "$staged"
echo "wheel: $(ls "$folder"/gtrain-*.whl)"
# The system's libraries are not inside.
if command -v dpkg-query >/dev/null; then
  mapfile -t needed < <(objdump -p "$staged"/bin/* "$staged"/lib/* | awk '$1 == "NEEDED" {print "*-linux-gnu/" $2}' | sort -u)
  packages=$(dpkg-query --search "${needed[@]}" 2>/dev/null | cut -d: -f1 | grep -vxE 'libc6|libgcc-s1' | sort -u)
  echo "wheel: where it is installed: apt-get install --no-install-recommends" $packages
fi
