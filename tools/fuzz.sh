#!/usr/bin/env bash
# Runs every BUILD_DIR/bin/fuzz_* for SECONDS_EACH over a copy of its corpus and prints what each did. Fails on any
# finding; the input lies in BUILD_DIR/fuzz/<target>/ then. Add it to tests/fuzz/corpus/<target>/ together with the fix.
# usage: fuzz.sh [BUILD_DIR [TARGET...]]     SECONDS_EACH=60
set -uo pipefail
build=${1:-build-fuzz}
shift || true
seconds=${SECONDS_EACH:-60}
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export LSAN_OPTIONS="suppressions=tools/lsan.supp:print_suppressions=0"
targets=("$@")
if [ "${#targets[@]}" -eq 0 ]; then
  mapfile -t targets < <(sed -n 's/^GT_FUZZ_TARGET(\(.*\))$/\1/p' tests/fuzz/targets.inc)
fi
failed=()
printf '%-18s %10s %10s %8s %8s %8s\n' target runs runs/s edges new inputs
for name in "${targets[@]}"; do
  work=$build/fuzz/$name
  mkdir -p "$work/inputs"
  dictionary=()
  for file in tests/fuzz/dict/common.dict "tests/fuzz/dict/$name.dict"; do cat "$file" 2>/dev/null; done > "$work/dict"
  [ -s "$work/dict" ] && dictionary=("-dict=$work/dict")
  # The copy grows from run to run and is never committed; the repository holds seeds and findings.
  if ! "$build/bin/fuzz_$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -malloc_limit_mb=512 \
      -max_len=65536 -print_final_stats=1 -artifact_prefix="$work/" "${dictionary[@]}" \
      "$work/inputs" "tests/fuzz/corpus/$name" > "$work/log" 2>&1; then
    failed+=("$name")
    grep -aE "GT_CHECK|ERROR: |runtime error|SUMMARY|Test unit written" "$work/log" | head -5
  fi
  stat() { sed -n "s/^stat::$1: *//p" "$work/log"; }
  cov() { grep -aoE 'cov: [0-9]+' "$work/log" | "$1" -1 | cut -d' ' -f2; }
  first=$(cov head) last=$(cov tail)
  printf '%-18s %10s %10s %8s %8s %8s\n' "$name" "$(stat number_of_executed_units)" "$(stat average_exec_per_sec)" \
    "${last:-0}" "$((${last:-0} - ${first:-0}))" "$(stat new_units_added)"
done
if [ "${#failed[@]}" -gt 0 ]; then echo "fuzz: FOUND something in ${failed[*]}: see $build/fuzz/"; exit 1; fi
echo "fuzz: ${#targets[@]} targets, $seconds s each, nothing found"
