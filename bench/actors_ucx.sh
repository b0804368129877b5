#!/usr/bin/env bash
# A peer of bench_actors: active messages of UCX by ucx_perftest (Debian's ucx-utils). Orders (orders.h) on standard input; $1: the
# transports (UCX_TLS). sync: round trips of 8 bytes each way; windowed, wide: so many messages of 8 bytes, one way, without an
# answer; large: of 1 MiB.
set -u
export UCX_TLS=$1 UCX_LOG_LEVEL=error
while read -r kind count; do
  case $kind in
    sync) test=ucp_am_lat bytes=8 ways=2 warm=1000 ;;
    large) test=ucp_am_bw bytes=1048576 ways=1 warm=10 ;;
    *) test=ucp_am_bw bytes=8 ways=1 warm=1000 ;;
  esac
  words=(-t "$test" -s "$bytes" -n "$count" -w "$warm" -p $((20000 + RANDOM % 10000)))
  ucx_perftest "${words[@]}" >/dev/null 2>&1 &
  seconds=
  for ((tries = 0; tries < 50 && ${#seconds} == 0; ++tries)); do  # until it listens
    sleep 0.1
    # The last row: iterations, then microseconds of one message one way: median, average, of all of them.
    seconds=$(ucx_perftest localhost "${words[@]}" 2>/dev/null |
      awk -v count="$count" -v ways="$ways" '/^Final:/ {printf "%.9f", $5 * ways * 1e-6 * count}')
  done
  kill %% 2>/dev/null
  wait
  echo "${seconds:-none}"
done
