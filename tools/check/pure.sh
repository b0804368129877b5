#!/usr/bin/env bash
# PURE targets need none of UCX, ZeroMQ, Cap'n Proto, RocksDB, CUDA: first by looking at what their tests
# load, then by configuring and building them where none of those is looked for.
# usage: pure.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build}
forbidden='lib(ucp|uct|ucs|ucm|zmq|sodium|capnp|kj|rocksdb|cuda|cudart|nccl|hwloc|curl|torch)[-.0-9_a-z]*\.so'
read -r -d '' -a tests < <(sed -n 2p "$build/pure_targets.txt" | tr ';' ' ') || true
wrong=0
for test in "${tests[@]}"; do
  if found=$(ldd "$build/tests/$test" | grep -oE "$forbidden"); then
    echo "pure: $test loads $(sort -u <<<"$found" | tr '\n' ' ')"
    wrong=1
  fi
done
[ "$wrong" -eq 0 ] || exit 1
[ "${#tests[@]}" -gt 0 ] || { echo "pure: no PURE tests in $build/pure_targets.txt"; exit 1; }

pure=$build/pure
cmake -S . -B "$pure" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O0 -g0' -DGTRAIN_PURE_ONLY=ON >"$build/pure.log" 2>&1 ||
  { tail -20 "$build/pure.log"; exit 1; }
cmake --build "$pure" --parallel "$(tools/jobs.sh)" >>"$build/pure.log" 2>&1 || { tail -40 "$build/pure.log"; exit 1; }
ctest --test-dir "$pure" --no-tests=error --output-on-failure >>"$build/pure.log" 2>&1 || { tail -40 "$build/pure.log"; exit 1; }
echo "pure: ${#tests[@]} tests build and pass without the adapters' libraries"
