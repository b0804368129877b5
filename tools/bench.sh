#!/usr/bin/env bash
# Runs every BUILD_DIR/bin/bench_* with --quick; the JSON reports land in BUILD_DIR/bench/.
# usage: bench.sh [BUILD_DIR]
set -uo pipefail
build=${1:-build}
mkdir -p "$build/bench"
failed=() count=0
for program in "$build"/bin/bench_*; do
  [ -x "$program" ] || continue
  name=$(basename "$program")
  echo "== $name"
  count=$((count + 1))
  timeout --kill-after=5 60 "$program" --quick --json "$build/bench/$name.json" || failed+=("$name")
done
if [ "$count" -eq 0 ]; then echo "bench: no bench_* in $build/bin"; exit 1; fi
if [ "${#failed[@]}" -gt 0 ]; then echo "bench: FAILED: ${failed[*]}"; exit 1; fi
echo "bench: $count programs; reports in $build/bench"
