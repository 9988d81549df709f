//! Prints `docs/errors.md`.
fn main() {
    print!("{}", replica_api::error::markdown());
}
