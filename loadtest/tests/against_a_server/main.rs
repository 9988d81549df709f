//! Whole runs, over real connections, against servers in this process.

mod open_loop;
mod rubbish;
mod server;
