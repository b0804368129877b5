#!/bin/bash
# The tests whose real length is minutes, one after the other, at that length; kills inside collectives, and
# end-to-end tests:
#   tools/soak.sh BUILD_DIR [TEST...]      TEST: module.Class or module.Class.method of tests/e2e
# `make test` runs the same ones shortened. Ends with 1 if any of them failed.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(cd "$1" && pwd)
shift
tests=("$@")
failed=()
if [ ${#tests[@]} = 0 ]; then
  echo "== comm_kill_test: a rank killed inside a collective, 1,000 times"
  GTRAIN_KILL_POINTS=1000 GTRAIN_BUILD_DIR="$build" "$build/tests/comm_kill_test" || failed+=(comm_kill_test)
  echo "== checkpoint_random_test: jobs that die, storage that fails, files that are damaged, 10,000 cases"
  GTRAIN_RANDOM_CASES=10000 "$build/tests/checkpoint_random_test" || failed+=(checkpoint_random_test)
  echo "== keeper_model_test: 3,000 lives of a keeper beside those of its model"
  GTRAIN_KEEPER_LIVES=3000 GTRAIN_BUILD_DIR="$build" "$build/tests/keeper_model_test" || failed+=(keeper_model_test)
  tests=(
    head_test.HeadKillsTest
    head_test.HeadPausedTest
    agent_test.AgentAtEveryMomentTest
    agent_test.KeeperLeaseTest
    network_test.LossTest
    client_test
    hostile_test
    chaos_test
    spot_test
    actors_soak_test
  )
fi
for test in "${tests[@]}"; do
  echo "== $test"
  (cd tests/e2e && GTRAIN_SOAK=1 GTRAIN_BUILD_DIR="$build" /usr/bin/python3 -B -m unittest -v "$test") || failed+=("$test")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "soak: FAILED: ${failed[*]}"
  exit 1
fi
echo "soak: all ${#tests[@]} passed, and what came before them"
