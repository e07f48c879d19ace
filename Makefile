# Two commands: `make reproduce` and `make test`. Each sets up what it needs, once.
VENV := .venv
BIN := $(VENV)/bin
OUT ?= kappascope-report

# Reaches packages' own build environments too, which -c would not.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One BLAS thread per process: two busy processes with two threads each are slower than one.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE := 1

.PHONY: reproduce test test-wheel browser clean

reproduce: $(VENV)/installed
	$(BIN)/kappascope reproduce --out $(OUT)

test: $(VENV)/installed-for-tests browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# The tests of what a user installs: the wheel, with no source beside the tests. Three files of tests
# are about the source itself.
WHEEL := wheel
WHEEL_TESTS ?= tests
test-wheel: browser
	rm -rf $(WHEEL) && mkdir -p $(WHEEL)/project
	python3 -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	$(WHEEL)/venv/bin/pip install --quiet "$$(echo $(CURDIR)/$(WHEEL)/*.whl)[test]"
	git archive HEAD | tar --extract --directory $(WHEEL)/project --exclude=src
	cd $(WHEEL)/project && ../venv/bin/pytest -n 2 $(WHEEL_TESTS) --ignore tests/test_architecture.py \
	  --ignore tests/test_packaging.py --ignore tests/test_docs.py

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[lab]'
	@touch $@

$(VENV)/installed-for-tests: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

# The reports are tested in a real browser. Where none can be had, those tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } \
	  >/dev/null 2>&1 || echo "no chromium: the tests that open reports in a browser are skipped"

clean:
	rm -rf $(VENV) $(OUT) $(WHEEL)
