# `make serve` and `make test` need only Python, and a C++ compiler for the native engine; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
DATA ?= tinyshakespeare
PRESET ?= cpu
MINUTES ?=
# A value as one word of the shell's.
quoted = '$(subst ','\'',$(1))'
# The run of DATA: my of ../my.txt, names of names.txt.gz, src of a folder src/.
NAME ?= $(shell name=$$(basename -- $(call quoted,$(DATA))); name=$${name%.gz}; echo "$${name%.*}")
BUNDLED := service/checkpoints/tinyshakespeare
CHECKPOINT ?= $(BUNDLED)

# PyPI's torch for Linux includes gigabytes of CUDA. Without an NVIDIA GPU, request the CPU build by its "+cpu", which no
# other build satisfies: first where pip is configured to look (a mirror, PIP_FIND_LINKS), then at TORCH_INDEX_URL, for
# torch alone. Set both for another build, or TORCH= for PyPI's.
TORCH ?= $(shell [ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1 || echo torch==2.13.0+cpu)
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
NATIVE := service/engine/native.cpp $(wildcard service/engine/native/*.h) training/model/fused.cpp
RUN := $(VENV)/.installed-service,training
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help serve train bundled native image lock sbom test test-lowest test-native-sanitized test-optimized test-slow \
  test-tools mutants chaos chaos-train bench bench-quick bench-table bench-train bench-exact bench-shares gpu-check load \
  load-sweep rules lint clean
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-21s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Variables: CHECKPOINT=DIR to serve, URL=http://… of a service to load, DATA=FILE, PRESET=quick|cpu|gpu or"
	@echo "MINUTES=N, and NAME to train, ARGS='more flags', PYTHON, VENV, TORCH and TORCH_INDEX_URL for another build of torch."

# Prints $(1), and the command that serves the checkpoint $(2), a word of the shell's.
next = $(BIN)/python -c 'import shlex, sys; print("$(1) make serve CHECKPOINT=" + shlex.quote(sys.argv[1]))' $(2)

serve: $(RUN) ## install, serve CHECKPOINT (default: the bundled one) on 127.0.0.1:8000
	@$(if $(filter file,$(origin CHECKPOINT)),last=$$(ls -td checkpoints/*/best 2>/dev/null | head -n 1); \
	  [ -z "$$last" ] || $(call next,Serving the bundled checkpoint; what was trained last:,"$$last"))
	$(BIN)/python -m service --checkpoint $(call quoted,$(CHECKPOINT)) $(ARGS)

train: $(RUN) ## train PRESET (default cpu) on DATA into checkpoints/NAME (default: DATA's); ARGS=--resume continues
	$(BIN)/python -m training train $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(and $(MINUTES),$(filter file,$(origin PRESET))),,--preset $(PRESET)) --data $(call quoted,$(DATA)) \
	  --out $(call quoted,checkpoints/$(NAME)) $(ARGS)
	@$(call next,Serve it:,$(call quoted,checkpoints/$(NAME)/best))

# Models that differ in their settings predict better together than models that differ in their seeds alone.
# THEN: what `cpu` was when it was made; windows of 256 keep its cache small. Flags that come later take precedence.
TEACHERS := 1 2 3 4 5 6
THEN := --block-size 256 --batch-size 8 --eval-every 610 --weight-decay 0.2 --score-chars all
TEACHER_2 := --block-size 512 --batch-size 4 --weight-decay 0.1
TEACHER_3 := --muon-lr 0.025 --muon-momentum 0.95 --weight-decay 0.24
TEACHER_4 := --block-size 512 --batch-size 4 --muon-lr 0.025 --muon-momentum 0.95
TEACHER_5 := --n-layer 8
TEACHER_6 := --n-embd 160
bundled: $(RUN) ## retrain the bundled checkpoint: six teachers, and their student, an estimated two hours
	set -e; $(foreach seed,$(TEACHERS),$(BIN)/python -m training train --seed $(seed) $(THEN) $(TEACHER_$(seed)) \
	  --out checkpoints/teacher-$(seed) --overwrite;)
	$(BIN)/python -m training train $(THEN) --steps 9760 --weight-decay 0.05 --teachers $(TEACHERS:%=checkpoints/teacher-%/best) \
	  --weights float16 --out checkpoints/bundled --overwrite
	rm -rf $(BUNDLED)
	mkdir -p $(BUNDLED)
	cp checkpoints/bundled/best/* $(BUNDLED)

native: $(RUN) ## compile engine and training kernels again, whether or not their sources have changed; CXX=clang++ for another compiler
	@$(BIN)/python setup.py --quiet build_ext --inplace --force

# CHARGPT_REQUIRE=docker,prometheus,… turns skips for lack of these into failures; tests/toolbox/needs.py lists them.
# Bytecode is kept, as some 300 processes would compile the same sources.
test: $(VENV)/.installed-test ## install test dependencies and run the suite; ARGS='-k model' selects tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

# Over the environment of the tests, whose torch and test tools stay.
LOWEST := $(VENV)/lowest
LOWEST_TESTS ?= tests/test_settings.py tests/http/test_api.py tests/observe/test_metrics.py tests/training/run/test_log.py
test-lowest: $(VENV)/.installed-test ## run some fast tests with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear $(LOWEST)
	$(BIN)/python -m tests.toolbox.lowest >$(LOWEST)/requirements.txt
	site=$$(echo $(LOWEST)/lib/python*/site-packages); \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$$site/others.pth"
	$(LOWEST)/bin/pip install --quiet --only-binary :all: --requirement $(LOWEST)/requirements.txt
	PYTHONPATH=. $(LOWEST)/bin/python -m pytest -n 2 --dist loadfile $(LOWEST_TESTS) $(ARGS)

# Only the assert statements of tests are executed, because pytest rewrites them. It warns of the others.
OPTIMIZED_TESTS ?= tests/test_toolbox.py::test_assert_statements_of_tests_are_executed tests/test_settings.py \
  tests/constrain tests/engine/test_scheduler.py tests/engine/test_worker.py \
  tests/model/test_sampling.py tests/model/test_tokenizer.py tests/http/test_api.py tests/http/test_bodies.py \
  tests/http/test_patterns.py tests/http/test_records.py tests/training/text/test_batches.py \
  tests/training/text/test_corpus.py tests/training/text/test_files.py tests/training/text/test_records.py
test-optimized: $(VENV)/.installed-test ## run fast tests with Python's -O, under which the service has no assert statements
	PYTHONOPTIMIZE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
	  -W 'ignore:assertions not in test modules:pytest.PytestConfigWarning' $(OPTIMIZED_TESTS) $(ARGS)

# Python itself is not instrumented: the runtime is preloaded, with libstdc++, whose exceptions it intercepts. Python
# leaves memory allocated at exit, and its own allocator would hide writes beyond the end of small buffers.
# With -O3 the instrumented source takes minutes to compile.
SANITIZED := out/sanitized/native.so
SANITIZED_FUSED := out/sanitized/fused.so
SANITIZED_VARIANTS = $(if $(filter x86_64,$(shell uname -m)),$(if $(shell grep avx512_bf16 /proc/cpuinfo),v4 v4bf16,v3 v3),base base)
test-native-sanitized: export CXX ?= g++
test-native-sanitized: $(VENV)/.installed-test ## run the tests of both native libraries under AddressSanitizer and UBSan
	CXXFLAGS='-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all' $(BIN)/python -c \
	  'from setup import *; files = zip(NAMES, ("$(SANITIZED)", "$(SANITIZED_FUSED)"), "$(SANITIZED_VARIANTS)".split()); \
  [compile_native(Path(file).absolute(), [*VARIANTS[source][name], "-O1"], source) for source, file, name in files]'
	LD_PRELOAD="$$($$CXX -print-file-name=libasan.so) $$($$CXX -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	  CHARGPT_NATIVE_LIBRARY='$(abspath $(SANITIZED))' CHARGPT_FUSED_LIBRARY='$(abspath $(SANITIZED_FUSED))' \
  $(BIN)/python -m pytest tests/engine tests/training/model/test_fused.py -k 'native or sanitized' $(ARGS)

COUNT ?= 60
SEED ?= 0
mutants: $(VENV)/.installed-dev ## make 60 small changes to FILE, one at a time, and show those that no test notices
	$(BIN)/python -m tests.toolbox.mutants --count $(COUNT) --seed $(SEED) $(if $(TESTS),--tests $(TESTS)) -- $(FILE)

chaos: $(VENV)/.installed-test ## kill, hang, flood and starve real servers, under 30 minutes: tests/chaos/RESULTS.md
	$(BIN)/python -m tests.chaos $(ARGS)

chaos-train: $(VENV)/.installed-test ## stop runs and saves at 116 random moments and compare the outcomes
	$(BIN)/python -m pytest -m chaos --capture=no --durations=0 $(ARGS)

# Building llama.cpp takes about nine minutes of one core, so no other target needs it.
test-slow: export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
test-slow: $(VENV)/.installed-test,llama ## build llama.cpp and compare its logits with ours
	$(BIN)/python -m pytest -m slow $(ARGS)

test-tools: $(VENV)/.installed-test ## run benchmarks, load sweep, load and chaos, tiny; test installation and what other tools check
	$(BIN)/python -m pytest -m tools -n 2 $(ARGS)

bench: $(VENV)/.installed-bench ## benchmark the service against its alternatives, about forty minutes: out/bench
	$(BIN)/python -m tests.bench.serve $(ARGS)

bench-quick: $(VENV)/.installed-bench ## the same with fewer systems, batch sizes and repeats, about five minutes
	$(BIN)/python -m tests.bench.serve --quick $(ARGS)

bench-table: $(VENV)/.installed-bench ## put the tables of out/bench/serve.json into tests/README.md
	$(BIN)/python -m tests.bench.serve --table $(ARGS)

load-sweep: $(VENV)/.installed-bench ## latency against offered load, beside llama.cpp and stock LitServe, about twenty minutes: out/load-sweep
	$(BIN)/python -m tests.load.sweep $(ARGS)

gpu-check: ## on an NVIDIA GPU: tests, benchmarks, training and image, about 25 minutes: out/gpu-check.md
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu-check: no NVIDIA GPU, nvidia-smi lists none" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(VENV)/.installed-bench
	$(BIN)/python -m tests.bench.gpu $(ARGS)

bench-exact: $(VENV)/.installed-test ## exact answers beside the mask's, of ARGS="--lists FILE …": out/bench-exact
	$(BIN)/python -m tests.bench.exact $(ARGS)

bench-shares: $(VENV)/.installed-test ## how much of its speed a client keeps beside another, three minutes: out/bench-shares
	$(BIN)/python -m tests.bench.shares $(ARGS)

bench-train: $(RUN) ## benchmark training beside nanoGPT's CPU recipe, each preset over three seeds: out/bench-train
	$(BIN)/python -m tests.bench.train $(ARGS)

load: $(VENV)/.installed-test ## send a minute of mixed load with Locust to URL, or to a server of CHECKPOINT: out/load
	@mkdir -p out/load
	$(BIN)/python -m locust --config tests/load/locust.conf --checkpoint '$(CHECKPOINT)' $(if $(URL),--host '$(URL)') $(ARGS)

rules: ## write what repeats of deploy/prometheus/rules.yml, and the PrometheusRule of deploy/k8s
	@$(PYTHON) deploy/prometheus/rules.py

# ARGS='--build-context wheels=DIR --build-arg TORCH_INDEX_URL=' takes torch from local wheels.
ACCELERATOR ?= cpu
image: $(VENV)/.installed-test ## build the image chargpt, with the version of the git tag; ACCELERATOR=torch, or cuda for NVIDIA GPUs
	docker build --tag chargpt --build-arg ACCELERATOR=$(ACCELERATOR) \
	  --build-arg VERSION="$$($(BIN)/python -m setuptools_scm)" \
	  --label org.opencontainers.image.revision="$$(git rev-parse HEAD)" \
	  --label org.opencontainers.image.created="$$(git show --no-patch --format=%cI)" $(ARGS) .

lock: $(VENV)/.installed-dev ## renew the versions and hashes that the image installs: deploy/image/*.txt
	$(BIN)/python deploy/image/lock.py

# Debian's packages are not in it. CycloneDX takes name and version of what it describes from a pyproject.toml.
SBOM := out/sbom.cdx.json
sbom: $(VENV)/.installed-test ## list what the image of ACCELERATOR installs, in CycloneDX: out/sbom.cdx.json
	@mkdir -p $(dir $(SBOM))
	@printf '[project]\nname = "chargpt"\nversion = "%s"\n' "$$($(BIN)/python -m setuptools_scm)" >$(SBOM).toml
	$(BIN)/python -W ignore::UserWarning -m cyclonedx_py requirements deploy/image/$(ACCELERATOR).txt \
	  --pyproject $(SBOM).toml --mc-type application --output-format JSON --output-file $(SBOM)
	@rm $(SBOM).toml

lint: $(VENV)/.installed-dev ## check style, types, the Dockerfile and the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

clean: ## remove the environment, the native libraries and tool caches; checkpoints stay
	rm -rf $(VENV) build *.egg-info service/engine/_native_* training/model/_fused_* .pytest_cache .hypothesis .mypy_cache .ruff_cache

# One stamp per set of extras. After a change of the native source alone, only that is compiled. pip compiles it too, but
# shows no warning where it cannot.
$(VENV)/.installed-%: pyproject.toml setup.py $(NATIVE)
	@$(if $(filter-out $(NATIVE),$?),$(install))
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

define install
[ -w . ] || { echo "$(CURDIR) is read-only and gets $(VENV) and compiled files: copy it to a folder of your own" >&2; exit 1; }
[ ! -e $(BIN)/pip ] || $(BIN)/pip --version >/dev/null 2>&1 || { echo \
  "$(VENV) does not work here, as after a move of the checkout: rm -r $(VENV), then make again" >&2; exit 1; }
$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or \
  sys.exit("chargpt needs Python 3.11 or later, $(PYTHON) is %d.%d: pass PYTHON=python3.12 or the like" % v[:2])'
echo "Installing into $(VENV): takes some minutes the first time"
$(PYTHON) -m venv $(VENV)
$(if $(TORCH),$(BIN)/pip install --quiet --no-deps '$(TORCH)' 2>/dev/null || \
  $(BIN)/pip install --no-deps --index-url '$(TORCH_INDEX_URL)' '$(TORCH)')
$(BIN)/pip install --quiet --editable '.[$*]' $(TORCH)
endef
