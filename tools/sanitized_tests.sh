#!/usr/bin/env bash
# Runs the tests of `make asan` or `make tsan`:  tools/sanitized_tests.sh BUILD_FOLDER [ARGUMENT OF CTEST]...
# A report fails the run even when no test notices it, because a daemon that dies of it is started again. Nothing of ours
# is suppressed; the suppressions name libraries that are not instrumented, and say why.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(cd "$1" && pwd)
shift

reports=$build/reports
rm -rf "$reports"
mkdir -m 1777 "$reports"  # tests run daemons as nobody, too
common="log_path=$reports/report:halt_on_error=1"
export ASAN_OPTIONS="$common:detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1"
export UBSAN_OPTIONS="$common:print_stacktrace=1"
export LSAN_OPTIONS="suppressions=$here/lsan.supp:print_suppressions=0"
# Threads that nobody joined are no finding: tests end processes in the middle of everything.
export TSAN_OPTIONS="$common:suppressions=$here/tsan.supp:second_deadlock_stack=1:report_thread_leaks=0"
# UCX's memory hooks take a lock in threads that have ended as far as ThreadSanitizer knows: it crashes.
export UCX_MEM_EVENTS=no

failed=0
# Programs of others (libtorch, Python) are not instrumented, so tests that run them are left to `make test`.
ctest --output-on-failure --no-tests=error --test-dir "$build" --label-exclude uninstrumented "$@" || failed=1
for report in "$reports"/*; do
  # Without an error it is a note, e.g. that a forked child could not stop the threads it does not have.
  grep -qsE 'ERROR:|WARNING:|runtime error:' "$report" || continue
  echo "==== $report"
  head -n 80 "$report"
  failed=1
done
exit "$failed"
