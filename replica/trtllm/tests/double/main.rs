//! The shim and both engines over the stand-in: every answer can be computed here, and every misfortune can be ordered.
//!
//! What the real library computes is not tested by any of this; that the right bytes go to the right place is, whatever the
//! library throws, delays, mixes up or fails.

mod cancel;
mod encoder;
mod engines;
mod failures;
mod outputs;
mod shutdown;
mod throng;
