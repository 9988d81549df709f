//! Tests of the shim and both engines on the test double: every result is recomputed here, and every failure can be
//! injected.
//!
//! The results of the real library are not tested; these tests check that the right bytes arrive at the right place,
//! even if the library throws, delays, reorders or fails.

mod cancel;
mod concurrency;
mod encoder;
mod engines;
mod failures;
mod outputs;
mod shutdown;
