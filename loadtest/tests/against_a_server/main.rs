//! Complete runs over real connections, against in-process servers.

mod capacity;
mod classify;
mod closed_loop;
mod http2;
mod invalid_responses;
mod open_loop;
mod server;
mod tls;
