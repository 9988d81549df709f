//! Prints `docs/errors.md`.
fn main() {
    print!("{}", replica_core::wire::error::markdown());
}
