# The commands a person types. Everything else is CMake: see CMakePresets.json.
#
#   make run      install what is missing, build, train examples/fashion_mnist on four ranks
#   make test     install, build, run every test
#   make build    build only
#   make check    format, lint, layers, headers, PURE targets, banned calls, bazel parity
#   make bench    every build/bin/bench_* with --quick; JSON under build/bench/
#   make asan     unit and multi-process tests under AddressSanitizer and UBSan
#   make tsan     the same under ThreadSanitizer
#   make bazel    base and the PURE folders with Debian's bazel-bootstrap
#   make clean    remove the build directories

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install build run test check bench asan tsan bazel clean

JOBS ?= $(shell tools/jobs.sh)
TEST_JOBS ?= 2
CTEST = ctest --output-on-failure --no-tests=error --parallel $(TEST_JOBS)

help:
	@sed -n 's/^#   //p' Makefile

install:
	@tools/install.sh

build: install
	@cmake --preset release
	@cmake --build build --parallel $(JOBS)

run: build
	@test -x build/examples/fashion_mnist || { echo "run: build/examples/fashion_mnist is not there: libtorch is missing, see the table above"; exit 1; }
	build/bin/gtrain launch examples/fashion_mnist/job.yaml $(ARGS)

test: build
	$(CTEST) --test-dir build $(ARGS)

check: build
	tools/check.sh $(ARGS)

bench: build
	tools/bench.sh build $(ARGS)

# Programs of others (libtorch, Python) are not instrumented, so tests that run them are left to `make test`.
asan tsan: install
	@cmake --preset $@
	@cmake --build build-$@ --parallel $(JOBS)
	source tools/sanitizer_env.sh && $(CTEST) --test-dir build-$@ --label-exclude uninstrumented $(ARGS)

bazel:
	tools/install.sh --bazel
	bazel/run.sh test $(ARGS)

clean:
	rm -rf build build-dev build-asan build-tsan bazel/.work
