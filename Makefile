PYTHON ?= python3
RUN = .venv/bin/python
# The tests start hundreds of processes: where this is set, each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install serve test test-gpu bench-check bench-gpu check proto docs

install: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	@echo "Setting up .venv, once: some minutes, most of them for torch"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(RUN) -m server.backends.cpu
	touch $@

serve: install
	$(RUN) launcher.py $(ARGS)

# Two workers or more, as there are cores; `make test ARGS=-n0` runs all in one process, as a debugger wants it.
test: install
	$(RUN) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

test-gpu: install
	$(RUN) -m pytest -m gpu $(ARGS)

bench-check: install
	$(RUN) -m benchmark promises $(ARGS)

bench-gpu: install
	$(RUN) -m benchmark gpu $(ARGS)

check: install
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && $(RUN) -m pytest -q tests/test_architecture.py tests/test_style.py

proto: install
	$(RUN) -m grpc_tools.protoc -Iserver/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/generate.proto

docs: install
	$(RUN) launcher.py --print-settings > docs/settings.md
