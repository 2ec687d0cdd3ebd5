# SPDX-License-Identifier: Apache-2.0
# What a developer types. Each target does its own set-up; the work is CMake's and the scripts'.
.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-web build web test test-full test-python test-integrations test-oldest test-web test-device test-device-nccl sanitize-device demo bench-cpu bench-web reliability reliability-device fuzz mutants mutants-webgpu mutants-web mutants-device format format-check lint docs install clean

FUZZ_SECONDS ?= 600
PREFIX ?= /usr/local
PORT ?= 8080
SOURCES = find cli cmake examples fuzz include src tests -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'

##@ To use it
help:  ## this list
	@awk -F ':.*## ' '/^##@ / { print gap substr($$0, 5); gap = "\n" } \
	  /^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo:  ## train a language model on text of this machine, or on TEXT="FILE...": three minutes on two cores
	@echo "demo: builds the program for this CPU alone (about 50 s on two cores, once), then trains a language model on text and lets it write (about 90 s)"
	@scripts/setup demo
	cmake --preset demo --log-level=WARNING
	cmake --build --preset demo
	build/demo/cli/logitless demo $(TEXT)

setup-web:
	@scripts/setup web

web: setup-web  ## build the WebGPU module and its pages into build/web and serve them on PORT (8080)
	@scripts/build-web
	@python3 tests/web/serving.py build/web $(PORT)

setup:  ## install what the build needs, and say what
	@scripts/setup

build: setup  ## the libraries and the command line, in build/release
	cmake --preset release
	cmake --build --preset release

install: build  ## install them to PREFIX (/usr/local)
	cmake --install build/release --prefix $(PREFIX)

clean:  ## remove every build
	rm -rf build

##@ To test it
setup-test:
	@scripts/setup test

test: setup-test  ## everything that must pass, in minutes
	@scripts/test

test-full: setup-test  ## the same with every case on every instruction set
	@LOGITLESS_TEST_FULL=1 scripts/test

test-python: setup-test  ## the Python package alone: format, types, tests
	cmake --preset release
	cmake --build --preset release --target logitless
	@scripts/test-python

test-integrations:  ## transformers, PEFT, Lightning, DDP, FSDP, flax, Megatron, torchtitan, Levanter really run with us, on the CPU
	@scripts/test-integrations

test-oldest:  ## the Python tests of one device with the oldest PyTorch, JAX and NumPy that README names
	@scripts/test-oldest

test-web: setup-test  ## WebGPU's shaders and pages alone, with wgpu-native and headless Chromium
	@scripts/test-web

test-device: setup-test  ## the conformance suite on this machine's GPU
	cmake --preset device
	cmake --build --preset device --target device_suite
	@scripts/test-device build/device

test-device-nccl: setup-test  ## a vocabulary split over this machine's GPUs with NCCL, from C++
	@scripts/fetch_nccl
	cmake --preset device
	cmake --build --preset device --target example_shards_nccl
	@scripts/test-device-nccl build/device

sanitize-device: setup-test  ## compute-sanitizer over ragged cases on this machine's GPU
	cmake --preset device
	cmake --build --preset device --target device_suite
	@scripts/sanitize-device build/device

format-check: setup-test
	@$(SOURCES) | xargs clang-format-19 --dry-run -Werror && echo "format: clean"

lint: format-check  ## the format and the written rules, without a build
	@scripts/lint

##@ To change and measure it
format: setup-test  ## rewrite every source with clang-format
	$(SOURCES) | xargs clang-format-19 -i

docs:  ## the API reference, of the Python package and of the C and C++ headers, into out/docs
	@scripts/setup docs
	cmake --preset release
	cmake --build --preset release --target logitless
	@scripts/docs

bench-cpu: setup  ## the CPU backend against its peers, in minutes; BENCH="--quick" only tries it
	@bench/setup
	cmake --preset release
	cmake --build --preset release --target logitless logitless_probe
	.venv-bench/bin/python bench/compare_cpu.py $(BENCH)

bench-web: setup-test  ## the page in headless Chromium: its first result, a call, a training step
	@scripts/build-web
	.venv-web/bin/python bench/web_page.py

reliability: setup-test  ## try what is promised, in an hour, and write out/reliability.md; PARTS="NAME,..." picks
	@scripts/setup reliability
	@scripts/reliability $(if $(PARTS),--only $(PARTS))

reliability-device: setup-test  ## the parts of it that need an NVIDIA GPU, into out/reliability-device.json; PARTS="NAME,..." picks
	cmake --preset device
	cmake --build --preset device --target device_suite logitless_cli reliability_bits reliability_divergences
	@scripts/reliability --device --build build/device $(if $(PARTS),--only $(PARTS))

fuzz: setup-test  ## every fuzzer for FUZZ_SECONDS (600) each
	cmake --preset asan
	cmake --build --preset asan
	@scripts/fuzz $(FUZZ_SECONDS)

mutants: setup-test  ## bugs put in on purpose, which the tests must catch; ONLY=TEXT picks some
	python3 scripts/mutants.py $(if $(ONLY),--only $(ONLY))

mutants-webgpu: setup-test  ## bugs put into the WebGPU backend, which the tests must catch; ONLY=TEXT picks some
	python3 scripts/mutants_webgpu.py $(if $(ONLY),--only "$(ONLY)")

mutants-web: setup-test  ## bugs put into the published shaders and logitless.js, which the web tests must catch; ONLY=TEXT picks some
	@scripts/build-web
	.venv-web/bin/python tests/web/mutants.py $(if $(ONLY),"$(ONLY)")

mutants-device: setup-test  ## bugs put into the CUDA backend, which the tests must catch on this machine's GPU; ONLY=TEXT picks some
	python3 scripts/mutants_device.py all $(if $(ONLY),--only "$(ONLY)")
