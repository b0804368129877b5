#!/usr/bin/env bash
# A peer of bench_actors: round trips of UCX's active messages over shared memory, 8 bytes each way, by
# ucx_perftest (Debian's ucx-utils). Each line "KIND COUNT" is answered with the seconds that COUNT of them took.
set -u
export UCX_TLS=sm,self UCX_LOG_LEVEL=error
while read -r _ count; do
  port=$((20000 + RANDOM % 10000))
  ucx_perftest -t ucp_am_lat -s 8 -n "$count" -p "$port" >/dev/null 2>&1 &
  seconds=
  for ((tries = 0; tries < 50 && ${#seconds} == 0; ++tries)); do  # until it listens
    sleep 0.1
    # The last row: iterations, then microseconds one way: median, average, of all of them.
    seconds=$(ucx_perftest localhost -t ucp_am_lat -s 8 -n "$count" -p "$port" 2>/dev/null |
      awk -v count="$count" '/^Final:/ {printf "%.9f", $5 * 2e-6 * count}')
  done
  kill %% 2>/dev/null
  wait
  echo "${seconds:-none}"
done
