#!/usr/bin/env bash
# Installs the Debian packages gtrain is built, tested and run with; only what is missing, so a second
# run does nothing and needs no root.
#   tools/install.sh            everything `make build` and `make test` use
#   tools/install.sh --run      only what `make run` uses
#   tools/install.sh --bazel    also what `make bazel` uses
#   tools/install.sh --bench    also the peers that `make bench` compares with
#   tools/install.sh --s3       also the S3 server that `make test-s3` runs against
#   tools/install.sh --list     print the package names and what each group is for
set -euo pipefail

# group | what is lost without it ("" = nothing is built without it) | packages
groups=(
  "build||cmake ninja-build g++ pkg-config git make"
  "core||libabsl-dev libgtest-dev libgmock-dev libzmq3-dev libsodium-dev libzstd-dev libcapnp-dev capnproto librocksdb-dev libhwloc-dev libyaml-cpp-dev libre2-dev nlohmann-json3-dev libxxhash-dev libhwy-dev libssl-dev libmsgpack-cxx-dev"
  "tests||python3 iproute2 procps util-linux mount e2fsprogs strace"
  "speed|slower builds|ccache lld"
  "lint|make check leaves out clang-format and clang-tidy, no make fuzz|clang clang-format clang-tidy"
  "bench|no micro-benchmarks|libbenchmark-dev"
  "ucx|ranks of one job stay on one machine|libucx-dev"
  "s3|no S3; its tests and bench_checkpoint are left out|libcurl4-openssl-dev libexpat1-dev libisal-dev libmicrohttpd-dev"
  "torch|examples/fashion_mnist and examples/torch_ddp are left out|libtorch-dev zlib1g-dev dataset-fashion-mnist libopenblas0-pthread python3-torch python3-numpy"
  "wheel|no make wheel|binutils python3-pip python3-setuptools python3-wheel python3-venv"
  "nets|tests that cut links are skipped|nftables"
  "coexist|the test that loads libgtrain beside gRPC is skipped|libgrpc++-dev"
)

say() { echo "install: $*"; }

case "${1:-}" in
  "") ;;
  --run)
    kept=()
    for group in "${groups[@]}"; do
      case "${group%%|*}" in build|core|speed|ucx|s3|torch) kept+=("$group") ;; esac
    done
    groups=("${kept[@]}") ;;
  --bazel)
    groups+=("bazel||bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-platforms") ;;
  --bench)
    groups+=("peers||libpmix-dev openmpi-bin libopenmpi-dev mpich libmpich-dev python3-boto3 bible-kjv bible-kjv-text ucx-utils libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libcaf-dev scotch") ;;
  --s3)
    groups+=("ceph||ceph-mon ceph-osd radosgw ceph-common curl") ;;
  --list)
    for group in "${groups[@]}"; do
      IFS='|' read -r name without packages <<<"$group"
      echo "$name: $packages${without:+  (without: $without)}"
    done
    exit 0 ;;
  *) echo "usage: tools/install.sh [--run | --bazel | --bench | --s3 | --list]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  say "this is not Debian: install the equivalents of 'tools/install.sh --list' yourself; going on with what is here"
  exit 0
fi

# missing PACKAGE...: those of them that are not installed
missing() {
  local installed
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null | awk '$2 == "installed" {print $1}' || true)
  for package in "$@"; do
    grep -qxF -- "$package" <<<"$installed" || echo "$package"
  done
}

root=()
can_install=yes
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
    root=(sudo)
  else
    can_install=no
  fi
fi

updated=no
apt_install() {
  if [ "$updated" = no ]; then
    "${root[@]}" apt-get update -qq
    updated=yes
  fi
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# What every build needs comes in one transaction; each optional group stands alone.
needed=() nothing_missing=yes
for group in "${groups[@]}"; do
  IFS='|' read -r name without packages <<<"$group"
  [ -n "$without" ] || needed+=($packages)
done
mapfile -t absent < <(missing "${needed[@]}")
if [ "${#absent[@]}" -gt 0 ]; then
  nothing_missing=no
  if [ "$can_install" = no ]; then
    say "missing and this user may not install them. As root: apt-get install --no-install-recommends ${absent[*]}" >&2
    exit 1
  fi
  say "installing ${absent[*]}"
  apt_install "${absent[@]}" || { say "apt-get failed: see above" >&2; exit 1; }
fi

for group in "${groups[@]}"; do
  IFS='|' read -r name without packages <<<"$group"
  [ -n "$without" ] || continue
  mapfile -t absent < <(missing $packages)
  [ "${#absent[@]}" -gt 0 ] || continue
  nothing_missing=no
  if [ "$can_install" = no ]; then
    say "going on without $name ($without). As root: apt-get install --no-install-recommends ${absent[*]}"
  else
    say "installing ${absent[*]}"
    apt_install "${absent[@]}" || say "going on without $name ($without): apt-get failed, see above"
  fi
done
if [ "$nothing_missing" = yes ]; then say "everything is there"; fi
