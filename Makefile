# ral: `make demo` shows it, `make test` tests it, `make install` installs it.

PYTHON ?= /usr/bin/python3
PREFIX ?= /usr/local
DESTDIR ?=
# Arguments for pytest: make test PYTEST_ARGS='-k terminal -x'
PYTEST_ARGS ?=
# Arguments for pytest in the virtual machine: make test-vm VM_ARGS='tests/vm -k journal'
VM_ARGS ?=

VENV := .venv
ROOMS := client broker helpers protocol
SOURCES := $(shell find $(ROOMS) systemd -type f ! -path '*/__pycache__/*') hatch_build.py pyproject.toml
INSTALLED := $(VENV)/ral-installed
LIBDIR = $(DESTDIR)$(PREFIX)/lib/ral
UNITDIR = $(DESTDIR)$(PREFIX)/lib/systemd/user
SHAREDIR = $(DESTDIR)$(PREFIX)/share
MANDIR = $(SHAREDIR)/man
# Where bash-completion, zsh and fish look for the completion of a command.
COMPLETIONS = bash-completion/completions/ral zsh/site-functions/_ral fish/vendor_completions.d/ral.fish

.PHONY: all host demo test test-vm lint format wheel develop install install-files uninstall clean
.DEFAULT_GOAL := all

all: $(INSTALLED)

# Distribution packages; prints the apt-get command before it runs it, and does nothing if none is missing.
host:
	@sh tools/host-packages.sh

# An installation of ral in .venv: the wheel, unless `make develop` linked the checkout there.
$(INSTALLED): $(SOURCES) | host
	@sh tools/venv.sh $(VENV) $(PYTHON) runtime test lint build
	@if [ ! -L $(VENV)/lib/python3.*/site-packages/ral_client ]; then \
	    set -x; $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
	        --force-reinstall .; fi
	@touch $@

demo: $(INSTALLED)
	@sh tools/demo.sh $(VENV)/bin/ral

test: host
	@sh tools/test.sh $(PYTHON) $(PYTEST_ARGS)

# A Debian with systemd as PID 1 and a kernel of its own; as root, some minutes without hardware acceleration.
test-vm: host
	@sh tools/vm.sh $(PYTHON) $(VM_ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYTHONPATH=client:broker:helpers:protocol $(VENV)/bin/lint-imports --no-logo

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

wheel: $(INSTALLED)
	$(VENV)/bin/python -m build --no-isolation --outdir dist .

# Links instead of copies: an edit needs no further command, a changed native program another `make develop`.
develop: host
	@sh tools/venv.sh $(VENV) $(PYTHON) runtime test lint build
	@$(VENV)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes ral 2>/dev/null
	$(PYTHON) helpers/build_native.py helpers/ral_helpers
	$(PYTHON) helpers/build_native.py $(VENV)/bin launcher
	@for site in $(VENV)/lib/python3.*/site-packages; do for room in $(ROOMS); do \
	    ln -sfn "$(CURDIR)/$$room/ral_$$room" "$$site/ral_$$room" || exit; done; done
	@mv $(VENV)/bin/launcher $(VENV)/bin/ral
	@$(VENV)/bin/python -m compileall -q client protocol
	@touch $(INSTALLED)

install: host
	umask 022; $(PYTHON) -m venv --clear $(LIBDIR)
	umask 022; $(LIBDIR)/bin/python -m pip install -qq --disable-pip-version-check --use-pep517 .
	@$(MAKE) --no-print-directory install-files

# What belongs to an installation in LIBDIR and lies outside of it.
install-files:
	install -d $(DESTDIR)$(PREFIX)/bin $(UNITDIR)
	ln -sfn ../lib/ral/bin/ral $(DESTDIR)$(PREFIX)/bin/ral
	sed 's|^ExecStart=ral |ExecStart=$(PREFIX)/bin/ral |' systemd/ral-broker.service >$(UNITDIR)/ral-broker.service
	install -m 0644 systemd/ral-broker.socket $(UNITDIR)/ral-broker.socket
	chmod 0644 $(UNITDIR)/ral-broker.service
	@for page in docs/man/*.[1-8]; do if [ -e "$$page" ]; then \
	    install -D -m 0644 "$$page" "$(MANDIR)/man$${page##*.}/$${page##*/}" || exit; fi; done
	@umask 022; for file in $(COMPLETIONS); do \
	    rm -f "$(SHAREDIR)/$$file" && mkdir -p "$(SHAREDIR)/$${file%/*}" && \
	    $(LIBDIR)/bin/ral completion "$${file%%[/-]*}" >"$(SHAREDIR)/$$file" || exit; done

uninstall:
	@test ! -d $(LIBDIR) || test -f $(LIBDIR)/pyvenv.cfg || { echo "ral: $(LIBDIR) was not made by make install" >&2; exit 1; }
	rm -rf $(LIBDIR)
	rm -f $(DESTDIR)$(PREFIX)/bin/ral $(UNITDIR)/ral-broker.socket $(UNITDIR)/ral-broker.service
	@for page in docs/man/*.[1-8]; do rm -f "$(MANDIR)/man$${page##*.}/$${page##*/}"; done
	rm -f $(addprefix $(SHAREDIR)/,$(COMPLETIONS))

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -f helpers/ral_helpers/trampoline helpers/ral_helpers/holder helpers/ral_helpers/zygote
