# The two commands of a fresh machine are `make demo` and `make test`; each sets up what it needs.
# CUDNN=off leaves out the cuDNN engine, PYTHON=off the Python package, TORCH=off its tests with
# PyTorch, each with what it needs from PyPI.
CUDNN ?= on
PYTHON ?= on
TORCH ?= on
export CUDNN PYTHON TORCH
export LAWSON_GOAL = $(firstword $(MAKECMDGOALS))

MODELS ?= $(addprefix examples/models/, llama-3.1-8b.json deepseek-v3.json gemma-2-9b.json gpt-oss-20b.json)
TARGETS ?= v100,a100,l40s,h200,b200

.DEFAULT_GOAL := help
.PHONY: help setup build demo test lint format asan tsan gpu-kit gpu-test clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo "  TORCH=off with any of them: without PyTorch (3 GB) and the tests that need it"
	@echo "  PYTHON=off with any of them: without the Python package"
	@echo "  CUDNN=off with any of them: only the reference and CPU engines; with PYTHON=off nothing from PyPI"

setup: ## install what a build and its tests need (Debian packages, .venv)
	@scripts/setup build lint python

build: ## configure and build everything: build/bin/lawson, build/lib, tests
	@scripts/setup build
	@scripts/build release

demo: ## the main job: what of some well-known models fuses, on which GPU, and why not
	@scripts/setup build
	@scripts/build release lawson-demo
	@scripts/demo $(TARGETS) $(MODELS)

test: ## everything: build, all tests, sanitizers, lint; ends with the counts
	@scripts/setup build lint python
	@scripts/test

lint: ## includes, clang-format, statics, clang-tidy
	@scripts/setup build lint
	@scripts/build release
	@scripts/lint

format: ## rewrite the sources as clang-format wants them
	@scripts/setup lint
	@scripts/format

asan: ## the tests without cuDNN under the address and undefined-behaviour sanitizers
	@scripts/setup build
	@scripts/test asan

tsan: ## the same under the thread sanitizer
	@scripts/setup build
	@scripts/test tsan

gpu-kit: ## what a GPU machine without registries needs, gathered in build/gpu-kit
	@scripts/setup build
	@scripts/build release lawson-demo
	@scripts/gpu-kit

gpu-test: ## build and run everything that needs a GPU, on a machine with one
	@scripts/gpu-test

clean: ## remove build/
	rm -rf build

distclean: clean ## remove build/ and .venv
	rm -rf .venv
