PYTHON ?= python3
RUN = .venv/bin/python
# The tests start hundreds of processes: where this is set, each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

WHEELS = dist/wheels
# What a machine with a GPU that has torch, Triton and transformers (with Pygments) lacks for one Python: below 20 MiB.
GPU_PYTHON ?= 3.12
AGENTS = @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code
PACKED = annotated-doc annotated-types anyio click execnet fastapi grpcio h11 httpcore2 httptools httpx2 idna iniconfig \
	llguidance opentelemetry-api orjson pluggy prometheus-client protobuf pydantic pydantic-core pytest pytest-xdist sniffio \
	starlette truststore typing-extensions typing-inspection uvicorn uvloop
ON_GPU = -m "gpu and not kernels" -W default -o faulthandler_timeout=150
PLATFORMS = $(foreach glibc,2_31 2_28 2_27 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64

.PHONY: needs install serve test test-rest test-formats test-offload test-kernels \
	test-clients test-suites test-nodes test-ray test-agents soak test-gpu bench-check bench-gpu pack compile-kernels gpu-first hollow-gpu check proto docs

install: needs .venv/installed

# What the targets of this call need, and what of that is missing, in words before anything starts.
needs:
	@$(PYTHON) tests/needs.py $(or $(MAKECMDGOALS),install)

.venv/installed: pyproject.toml constraints.txt
	@echo "Setting up .venv, once: some minutes, most of them for torch"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(RUN) -m server.backends.cpu
	touch $@

serve: needs install
	$(RUN) launcher.py $(ARGS)

# A worker for each core and one more, four at most; `make test ARGS=-n0` runs all in one process, as a debugger wants it.
# ARGS="--cpu-kernels avx2" (or another kind that this machine has) runs all tests with the CPU kernels of that kind; with
# ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 before it torch is limited too. Tests that need instructions which the
# processor lacks are skipped, and the last lines say why.
test: needs install
	$(RUN) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

# The dear half of the suite: more orders of deaths, more shards, stages, nodes and kinds of what `make test` has once.
test-rest: needs install
	$(RUN) -m pytest -m "rest and not (gpu or formats or offload or kernels or nodes or ray or agents)" --numprocesses auto --maxprocesses 4 --dist worksteal tests $(ARGS)

# Clients whose pins conflict with ours, each in an environment of its own below .venv-clients.
test-clients: needs install
	$(RUN) -m tests.clients $(ARGS)

# What others wrote to test servers, from their packages' source archives: schemas as grammars, and their servers' tests.
test-suites: needs install
	$(RUN) -m tests.suites $(ARGS)

# Every format of quantised checkpoints with every family, and with the libraries that write them, each of these in an
# environment of its own below .venv-formats, which takes gigabytes; then the perplexity of the held-out text in every
# format.
test-formats: needs install
	$(RUN) -m pytest -m formats tests/formats tests/server/quantisation tests/server/quantize tests/server/checkpoint $(ARGS)
	$(RUN) -m tests.server.quantisation.quantised_perplexity --check

# Weights and KV blocks that are not on the device, with every family, share and format; jobs that survive their death.
test-offload: needs install
	$(RUN) -m pytest -m offload tests $(ARGS)

# The kernels for GPUs in all shapes, interpreted and compiled.
test-kernels: needs install
	$(RUN) -m pytest -m kernels tests/server/backends/cuda/test_triton.py $(ARGS)

# Servers on several nodes, each a network namespace of this machine, whose cables are pulled and lose packets. As root.
test-nodes: needs install
	$(RUN) -m pytest -m nodes tests/nodes $(ARGS)

# Replicas on Ray Serve and jobs on Ray Data: a cluster of three nodes on this machine, in an environment of its own, which
# takes 600 MB beside what .venv has; prints what it found as two tables. ARGS="--lines 20000" is for the second.
test-ray: needs .venv-ray/installed
	PYTHONPATH=.:deploy/ray .venv-ray/bin/python -m pytest -m ray -q -s tests/ray
	PYTHONPATH=.:deploy/ray .venv-ray/bin/python -W ignore -m tests.ray.data $(ARGS)

# Agents for coding as people have them, in their newest versions, from npm: 1 GB.
test-agents: needs install
	npm install --silent --no-audit --no-fund --prefix .venv-agents $(AGENTS)
	$(RUN) -m pytest -m agents -q tests/agents $(ARGS)

.venv-ray/installed: install
	test -x .venv-ray/bin/pip || $(PYTHON) -m venv .venv-ray
	$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$(.venv-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	.venv-ray/bin/pip install --quiet --constraint constraints.txt 'ray[serve,data]>=2.50'
	touch $@

# An hour of killed and stopped processes, alone, in every order and of those for chats and grammars; then an hour of
# streams: tokens, memory, descriptors.
soak: needs install
	$(RUN) -m tests.system.survival --kills 50
	$(RUN) -m tests.system.survival --kills 20 --fault stop
	$(RUN) -m tests.system.kill_orders --times 100
	$(RUN) -m tests.system.kill_orders --times 100 --pipeline-parallel 2
	$(RUN) -m tests.system.storm --minutes 10
	$(RUN) -m tests.system.soak --minutes 60

# Engines one after the other, as they take all memory; kernels beside each other: a few minutes on one GPU. ARGS="-m gpu"
# for every shape of the kernels, each of which takes a second to compile.
test-gpu: needs install
	$(RUN) -m pytest $(ON_GPU) tests/gpu/engines $(ARGS)
	$(RUN) -m pytest $(ON_GPU) --numprocesses auto --dist worksteal tests/gpu/kernels $(ARGS)

# What is promised of time, and the policy that `auto` chooses against random ones, by the clock of a disk.
bench-check: needs install
	$(RUN) -m tests.system.promises $(ARGS)
	$(RUN) -m tests.server.offload.policies

bench-gpu: needs install
	$(RUN) -m benchmark gpu $(ARGS)

# For a machine with a GPU and without a network: pack here and carry the folder $(WHEELS) beside the tree.
pack: needs install
	rm -rf $(WHEELS)
	sed 's/_/-/g' constraints.txt | grep -iE '^($(shell echo $(PACKED) | tr ' ' '|'))==' > .venv/packed.txt
	$(RUN) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(PLATFORMS) --dest $(WHEELS) --requirement .venv/packed.txt
	du -sh $(WHEELS)

# Every kernel, compiled for an H100 or H200 without one, by the Triton of torch 2.11 and by ours, on a core each.
compile-kernels: needs install .venv/triton-3.6/installed
	PYTHONPATH=.venv/triton-3.6 $(RUN) -m benchmark kernels --capability 9.0 > .venv/triton-3.6/compiled.txt & other=$$!; \
	$(RUN) -m benchmark kernels --capability 9.0 | grep Triton && wait $$other && grep Triton .venv/triton-3.6/compiled.txt

.venv/triton-3.6/installed: install
	.venv/bin/pip install --quiet --no-deps --upgrade --target .venv/triton-3.6 triton==3.6.0
	touch $@

# Packs what the first minutes on a GPU need, and rehearses them without one: what is run there is said at the end.
gpu-first: needs install pack
	$(RUN) -m benchmark gpu-first --run rehearsal --minutes 40 --output dist/rehearsal

# The GPU's tests and a server on a GPU that computes nothing (tests/gpu/hollow), in an environment as that of a machine
# with one: torch 2.11 for CUDA, 5 GB. What fails here would have failed on a GPU.
HOLLOW = .venv-hollow/bin/python -m tests.gpu.hollow .venv-hollow/bin/python
hollow-gpu: needs install .venv-hollow/installed
	$(HOLLOW) -m pytest -p tests.gpu.hollow.values $(ON_GPU) tests/gpu $(ARGS)
	HOLLOW_GPUS=4 $(HOLLOW) -m pytest -p tests.gpu.hollow.values $(ON_GPU) tests/gpu/engines -k "nccl or of_its_own or two_nodes"
	$(HOLLOW) -m benchmark latency --random-weights bloom-560m --device cuda --dtype bfloat16 -b 1 8 -s 100 -d 20 -r 2

.venv-hollow/installed: pyproject.toml constraints.txt
	$(MAKE) pack
	python$(GPU_PYTHON) -m venv .venv-hollow
	.venv-hollow/bin/pip install --quiet torch==2.11.0 transformers==5.17.0 tokenizers==0.23.2 numpy hypothesis pygments \
		regex $(WHEELS)/*.whl
	touch $@

check: needs install
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && $(RUN) -m pytest -q --numprocesses auto tests/test_architecture.py tests/test_style.py

proto: needs install
	$(RUN) -m grpc_tools.protoc -Iserver/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/generate.proto

docs: needs install
	$(RUN) launcher.py --print-settings > .venv/settings.md && mv .venv/settings.md docs/settings.md
