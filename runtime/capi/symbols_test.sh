#!/usr/bin/env bash
# symbols_test.sh LIBRARY HEADER...: the library exports exactly the functions that the headers declare.
set -euo pipefail
exported=$(nm -D --defined-only "$1" | awk '{print $NF}' | sed 's/@.*//' | sort -u)
declared=$(grep -ohE '\bgtrain_[a-z_]+\(' "${@:2}" | tr -d '(' | sort -u)
if [[ "$exported" != "$declared" ]]; then
  echo "exported by $1 (right) and declared in ${*:2} (left) differ:"
  diff <(echo "$declared") <(echo "$exported") || true
  exit 1
fi
echo "$(wc -l <<<"$declared") functions, nothing else"
