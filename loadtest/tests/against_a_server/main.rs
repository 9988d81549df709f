//! Complete runs over real connections, against in-process servers.

mod capacity;
mod closed_loop;
mod invalid_responses;
mod open_loop;
mod server;
mod tls;
