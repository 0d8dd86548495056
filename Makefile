# Each target sets up everything it needs in .venv (see tools/venv.sh) and runs; a second run re-uses the set-up.
# PYTHON picks the interpreter that .venv is made with:  make test PYTHON=python3.12
PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   compile three models, compare speed and results with eager"
	@echo "make test   run all tests"
	@echo "make lint   ruff and mypy"
	@echo "make bench  compare with other backends; ARGS='...' goes to python -m benchmarks"
	@echo "make clean  remove .venv"

demo:
	@PYTHON="$(PYTHON)" sh tools/venv.sh triton,test
	$(PY) -m altbackend demo $(ARGS)

# Three workers on two cores: tests wait for compilers and for other processes.
test:
	@PYTHON="$(PYTHON)" sh tools/venv.sh triton,test
	$(PY) -m pytest -n 3 $(ARGS) test

lint:
	@PYTHON="$(PYTHON)" sh tools/venv.sh triton,test lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench:
	@PYTHON="$(PYTHON)" sh tools/venv.sh triton,test bench
	$(PY) -m benchmarks $(ARGS)

clean:
	rm -rf .venv
