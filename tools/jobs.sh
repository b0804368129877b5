#!/usr/bin/env bash
# How many compilers to run at once: the cores this process may use, but at most one per 1.5 GiB of available memory.
set -euo pipefail
cores=$(nproc)
by_memory=$(awk '/^MemAvailable:/ {print int($2 / (1536 * 1024))}' /proc/meminfo)
jobs=$cores
if [ "${by_memory:-0}" -gt 0 ] && [ "$by_memory" -lt "$jobs" ]; then jobs=$by_memory; fi
if [ "$jobs" -lt 1 ]; then jobs=1; fi
echo "$jobs"
