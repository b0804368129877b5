#!/usr/bin/env bash
# Actors under AddressSanitizer and UndefinedBehaviorSanitizer as users' compilers make their coroutines, of which g++ 12 has made
# wrong code (temporaries in a co_await).
# Arguments: the test's source, the folder of the headers, libgtrain.so, then the compilers.
set -euo pipefail
source=$1 include=$2 library=$3
shift 3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for compiler in "$@"; do
  # clang 14 makes no object of a coroutine whose type it would check at calls through pointers.
  left_out=()
  [[ $compiler != *clang* ]] || left_out=(-fno-sanitize=function)
  "$compiler" -std=c++20 -O1 -g1 -Wall -Wextra -Werror -fsanitize=address,undefined "${left_out[@]}" \
    -fno-sanitize-recover=undefined -I"$include" "$source" "$library" \
    -Wl,-rpath,"$(dirname "$library")" -pthread -o "$folder/test"
  timeout 100 "$folder/test"
done
