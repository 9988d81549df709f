//! What becomes of requests that find no replica ready: at the door of a region, and through an edge before two of them.
//! The replicas are scripted and become ready when the test says so; everything else is real.

mod door;
mod edge;
mod scene;
