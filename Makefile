# The commands a person types. Everything else is CMake: see CMakePresets.json.
#
#   make run      install and build what it needs (about half of all), train examples/fashion_mnist on four ranks
#   make test     install, build, run every test
#   make build    build only
#   make wheel    build/wheel/gtrain-*.whl: the Python package, libgtrain.so and the programs, for pip
#   make test-s3  install Ceph's S3 gateway and test checkpoints against it
#   make test-torch  PyPI's torch, accelerate, lightning and transformers (6 GB, once) under gtrain: tests/torch
#   make check    format, lint, layers, shape, headers, PURE targets, banned calls, fault ids, bazel parity, mutants still fit
#   make mutants  plants each mutant of tests/mutants, says which gate catches it
#   make soak     minutes of faults on real processes; GTRAIN_SOAK_SECONDS=N shortens the ten minutes of head kills
#   make sim      20,000 seeds of the simulated cluster, at most 60 minutes, and 5,000 of jobs of actors, at most 30; build/sim/*.txt
#   make goodput  a recorded spot trace of 395 h in the simulator: jobs in place beside jobs that restart; twenty minutes
#   make powercut 300 power cuts under load on a loop-mounted ext4 (root); ARGS="--cuts N --workers N --seed N"
#   make bench    every build/bin/bench_* with --quick; JSON under build/bench/
#   make bench-gate  ratios of bench/baseline.json measured again; fails when one has become worse beyond its spread; an idle machine, 5 min
#   make asan     unit and multi-process tests under AddressSanitizer and UBSan
#   make tsan     the same under ThreadSanitizer
#   make asan-core  PURE code, codecs, formats, golden traces and 300 seeds of the simulator under AddressSanitizer and UBSan
#   make fuzz     every libFuzzer target of tests/fuzz for SECONDS_EACH (60) seconds, clang; fails on a finding
#   make bazel    base and the PURE folders with Debian's bazel-bootstrap
#   make clean    remove the build directories

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install build run test wheel test-s3 test-torch check sim goodput soak powercut bench bench-gate mutants fuzz asan tsan asan-core bazel clean

JOBS ?= $(shell tools/jobs.sh)
# Most tests wait more than they compute: three of them leave two cores half idle.
TEST_JOBS ?= 3
CTEST = ctest --output-on-failure --no-tests=error --parallel $(TEST_JOBS)

help:
	@sed -n 's/^#   //p' Makefile

install:
	@tools/install.sh

build: install
	@cmake --preset release
	@cmake --build build --parallel $(JOBS)

# What the main job needs, so that a first look does not wait for tests and benches.
RUN_TARGETS = gtrain gtrain-keeper gtrain-writer fashion_mnist

run:
	@tools/install.sh --run
	@cmake --preset release
	@tools/build_for_run.sh build $(JOBS) $(RUN_TARGETS)
	@test -x build/examples/fashion_mnist || { echo "run: build/examples/fashion_mnist is not there: libtorch is missing, see the table above"; exit 1; }
	build/bin/gtrain launch examples/fashion_mnist/job.yaml $(ARGS)

test: build
	$(CTEST) --test-dir build $(ARGS)

test-s3: build
	tools/install.sh --s3
	$(CTEST) --test-dir build --tests-regex s3 $(ARGS)

wheel: install
	@cmake --preset release
	@cmake --build build --parallel $(JOBS) --target wheel

test-torch: install
	@cmake --preset release
	@cmake --build build --parallel $(JOBS) --target gtrain gtrain-keeper gtrain-writer
	python=$$(tools/torch_env.sh) && GTRAIN_BUILD_DIR=$(CURDIR)/build $$python -B tests/torch/torch_test.py $(ARGS)

check: build
	tools/check.sh $(ARGS)

soak: build
	tools/soak.sh build $(ARGS)

goodput: install
	@cmake --preset release
	@cmake --build build --parallel $(JOBS) --target gtrain-sim
	tools/goodput.py --table $(ARGS)

sim: install
	@cmake --preset release
	@cmake --build build --parallel $(JOBS) --target gtrain-sim
	@mkdir -p build/sim
	build/bin/gtrain-sim --scenario tests/sim/scenarios --seeds 1..20000 --jobs 2 --minutes 60 --report build/sim/report.txt $(ARGS)
	build/bin/gtrain-sim --actors --seeds 1..5000 --jobs 2 --minutes 30 --report build/sim/actors.txt
	build/bin/gtrain-sim --fleet

powercut: build
	build/tests/power_cuts --gtrain build/bin/gtrain $(ARGS)

bench: build
	tools/bench.sh build $(ARGS)

bench-gate:
	tools/install.sh --bench
	@$(MAKE) --no-print-directory build
	tools/bench_gate.py build $(ARGS)

mutants: install
	tools/mutants.py $(ARGS)

asan tsan: install
	@cmake --preset $@
	@cmake --build build-$@ --parallel $(JOBS)
	tools/sanitized_tests.sh build-$@ --parallel $(TEST_JOBS) $(ARGS)

# What decides, encodes and stores, without processes and networks: few enough for every change.
CORE_TESTS = base_test checkpoint_format_test checkpoint_plan_test comm_codec_test comm_plan_test fuzz_regression_test \
  elastic_plan_test golden_test job_plan_test job_spec_test runtime_core_test runtime_wire_test sharding_test
space := $(subst ,, )

asan-core: install
	@cmake --preset asan
	@cmake --build build-asan --parallel $(JOBS) --target $(CORE_TESTS) gtrain-sim
	tools/sanitized_tests.sh build-asan --parallel $(TEST_JOBS) --tests-regex '^($(subst $(space),|,$(strip $(CORE_TESTS)))|sim_test)$$' $(ARGS)

fuzz: install
	@cmake --preset fuzz
	@cmake --build build-fuzz --parallel $(JOBS) --target fuzz
	tools/fuzz.sh build-fuzz $(ARGS)

bazel:
	tools/install.sh --bazel
	bazel/run.sh test $(ARGS)

clean:
	rm -rf build build-dev build-asan build-tsan build-fuzz bazel/.work
