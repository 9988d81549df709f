//! Durable jobs: storage of a queue, and the process that serves it.
//!
//! ```text
//! submit ─▶ batch ─▶ object (payloads) ─▶ log (records) ─▶ queue ─▶ response
//! ```
//!
//! In reading order: [`log`] stores the records of a queue ([`log::EmbeddedJobLog`] in one file), [`objects`] the payloads
//! and results in a folder or in a [`bucket`], and [`queue_host`] writes both and applies the log. [`webhook`] sends results. The decisions are in
//! `jobs_core`.

pub mod bucket;
pub mod cpu;
pub mod dir_lock;
pub mod log;
pub mod objects;
pub mod queue_host;
mod space;
pub mod webhook;
