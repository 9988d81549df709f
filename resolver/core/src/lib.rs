//! Decisions about names and their addresses.
//!
//! - [`names`]: cache of DNS answers: validity, refresh, and behaviour while the DNS servers fail.
//! - [`race`]: connection attempts to several addresses (Happy Eyeballs, RFC 8305).
//! - [`config`]: the table `[dns]` of gateways and spokes.
//!
//! Everything here is pure: the package `resolver` has the sockets and the clock.

pub mod config;
pub mod names;
pub mod race;

/// Returns an arbitrary instant as the time origin of a test.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "the standard library offers no other constructor, and no test depends on the value"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
