#!/usr/bin/env bash
# clang-format on every C++ file; `--fix` rewrites them.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v clang-format >/dev/null || { echo "format: clang-format is not installed (tools/install.sh)"; exit 1; }
mode=(--dry-run --Werror)
if [ "${1:-}" = --fix ]; then mode=(-i); fi
mapfile -t files < <(git ls-files --cached --others --exclude-standard '*.h' '*.cc' '*.c' '*.cu' '*.cuh' |
  while read -r file; do [ -f "$file" ] && echo "$file"; done)
clang-format "${mode[@]}" "${files[@]}"
echo "format: ${#files[@]} files"
