#!/usr/bin/env bash
# Every public header compiles alone, with nothing but include/ on the path; gtrain_c.h as C too, all with clang if it is there.
set -euo pipefail
cd "$(dirname "$0")/../.."
warnings=(-Wall -Wextra -Werror -fsyntax-only)
count=0
for header in include/gtrain/*.h; do
  echo "#include <gtrain/$(basename "$header")>" | g++ -std=c++20 "${warnings[@]}" -Iinclude -x c++ -
  if command -v clang++ >/dev/null; then
    echo "#include <gtrain/$(basename "$header")>" | clang++ -std=c++20 "${warnings[@]}" -Iinclude -x c++ -
  fi
  case "$header" in
    *_c.h) echo "#include <gtrain/$(basename "$header")>" | gcc -std=c11 -pedantic "${warnings[@]}" -Iinclude -x c - ;;
  esac
  count=$((count + 1))
done
if bad=$(grep -nE '^\s*#\s*include' include/gtrain/*.h | grep -vE '[<"]gtrain/[a-z_]+\.h[>"]|<[a-z_]+(\.h)?>'); then
  echo "$bad"
  echo "headers: public headers include the standard library and each other only"
  exit 1
fi
echo "headers: $count public headers compile alone"
