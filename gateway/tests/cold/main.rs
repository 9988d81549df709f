//! What becomes of requests that find no replica ready: at the door of a region, and through an edge before two of them.
//! The replicas are scripted and become ready when the test says so; everything else is real.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod door;
mod edge;
#[path = "../scene/hub.rs"]
mod hub;
mod scene;
