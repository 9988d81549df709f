//! Tests of the parser: heads, chunks, complete responses, and a search for responses that break it.

mod chunks;
mod fuzz;
mod head;
mod response;
