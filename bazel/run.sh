#!/usr/bin/env bash
# Builds base and the PURE folders with Debian's bazel-bootstrap and runs their unit tests. Nothing is fetched.
# usage: bazel/run.sh [build|test] [BAZEL ARGUMENT ...]
#
# Bazel wants its WORKSPACE at the root of what it builds; ours stays out of the way by building a tree of links
# in bazel/.work instead.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
command -v bazel >/dev/null || { echo "bazel: not installed; run tools/install.sh --bazel"; exit 1; }
verb=${1:-test}
shift || true

tree=bazel/.work/tree
rm -rf "$tree"
mkdir -p "$tree"
for entry in base sharding runtime launcher comm checkpoint topology include tests bazel; do
  if [ -e "$entry" ]; then ln -s "$root/$entry" "$tree/$entry"; fi
done
ln -s "$root/bazel/WORKSPACE" "$tree/WORKSPACE"
ln -s "$root/bazel/gtrain.BUILD" "$tree/BUILD"

cd "$tree"
# The server ends with this script: Bazel's would otherwise stay for three hours.
trap 'bazel --output_user_root="$root/bazel/.work/out" shutdown >/dev/null 2>&1 || true' EXIT
bazel --output_user_root="$root/bazel/.work/out" --max_idle_secs=60 "$verb" \
  --override_repository=rules_cc="$root/bazel/rules_cc" \
  --override_repository=remote_coverage_tools="$root/bazel/remote_coverage_tools" \
  --override_repository=rules_java=/usr/share/bazel/rules/java \
  --override_repository=rules_proto=/usr/share/bazel/rules/proto \
  --override_repository=platforms=/usr/share/bazel/platforms \
  --spawn_strategy=processwrapper-sandbox \
  --jobs="$("$root/tools/jobs.sh")" --curses=no --color=no --test_output=errors "$@" //:all
