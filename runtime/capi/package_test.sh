#!/usr/bin/env bash
# package_test.sh CMAKE BUILD: installs the sdk component aside and builds a C program against it with find_package.
set -euo pipefail
cmake=$1 build=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$cmake" --install "$build" --component sdk --prefix "$folder/prefix" >/dev/null
mkdir "$folder/user"
cat >"$folder/user/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES C)
find_package(gtrain 0.1 REQUIRED)
add_executable(user user.c)
target_link_libraries(user PRIVATE gtrain::gtrain)
END
cat >"$folder/user/user.c" <<'END'
#include <gtrain/gtrain_c.h>
int main(void) { return gtrain_abi() == GTRAIN_C_ABI ? 0 : 1; }
END
"$cmake" -S "$folder/user" -B "$folder/user/build" -DCMAKE_PREFIX_PATH="$folder/prefix" >/dev/null
"$cmake" --build "$folder/user/build"
"$folder/user/build/user"
echo ok
