#!/bin/bash
# The end-to-end tests whose real length is minutes, one after the other, at that length:
#   tools/soak.sh BUILD_DIR [TEST...]      TEST: module.Class or module.Class.method of tests/e2e
# `make test` runs the same ones shortened. Ends with 1 if any of them failed.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(cd "$1" && pwd)
shift
tests=("$@")
if [ ${#tests[@]} = 0 ]; then
  tests=(
    head_test.HeadKillsTest
    head_test.HeadPausedTest
    agent_test.AgentAtEveryMomentTest
    agent_test.KeeperLeaseTest
    network_test.LossTest
    client_test
    hostile_test
  )
fi
failed=()
for test in "${tests[@]}"; do
  echo "== $test"
  (cd tests/e2e && GTRAIN_SOAK=1 GTRAIN_BUILD_DIR="$build" /usr/bin/python3 -B -m unittest -v "$test") || failed+=("$test")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "soak: FAILED: ${failed[*]}"
  exit 1
fi
echo "soak: ${#tests[@]} of ${#tests[@]} passed"
