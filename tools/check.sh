#!/usr/bin/env bash
# `make check`: every check, all of them even after one fails, a line each at the end.
#   tools/check.sh            all, against build/
#   tools/check.sh NAME ...   only those: format layers shape banned faults headers parity mutants pure tidy
set -uo pipefail
cd "$(dirname "$0")/.."
build=${BUILD_DIR:-build}
checks=("$@")
if [ "${#checks[@]}" -eq 0 ]; then checks=(format layers shape banned faults headers parity mutants pure tidy); fi
failed=()
for check in "${checks[@]}"; do
  echo "== $check"
  case "$check" in
    format) tools/check/format.sh ;;
    layers) python3 tools/check/layers.py ;;
    shape) python3 tools/check/shape.py ;;
    banned) python3 tools/check/banned.py ;;
    faults) python3 tools/check/faults.py ;;
    headers) tools/check/headers.sh ;;
    parity) python3 bazel/parity.py ;;
    mutants) python3 tools/mutants.py --check ;;
    pure) tools/check/pure.sh "$build" ;;
    tidy) python3 tools/check/tidy.py "$build" ;;
    *) echo "unknown check $check"; exit 2 ;;
  esac || failed+=("$check")
done
if [ "${#failed[@]}" -gt 0 ]; then
  echo "check: FAILED: ${failed[*]}"
  exit 1
fi
echo "check: all passed (${checks[*]})"
