//! Whole runs, over real connections, against servers in this process.

mod capacity;
mod closed_loop;
mod open_loop;
mod rubbish;
mod server;
mod tls;
