//! Files and batches, as in the API of OpenAI: a file has one request on each line, and a batch computes all of them.
//!
//! ```text
//! upload ─▶ scan (segments) ─▶ file ─▶ plan (chunks) ─▶ batch ─▶ jobs ─▶ output and error lines
//! ```
//!
//! A file is stored in [segments](segment::FileSegment) of consecutive lines. A chunk of a batch has the lines of one segment
//! that name one deployment, and is a job of the queue: leases, retries, fairness and pace are those of jobs. The result of a
//! chunk has a line for each line of the input, and the line begins with its number, so the results of the chunks of a segment
//! are merged in the order of the input when they are read ([`output::merge`]).
//!
//! In reading order: [`id`], [`line`](mod@line) (validation of one line), [`segment`] (a file in segments), [`state`] (files and
//! batches, changed by the records of the queue), [`output`] (lines of results), [`pack`] (lines that are computed together).

pub mod id;
pub mod line;
pub mod output;
pub mod pack;
pub mod segment;
pub mod state;
#[cfg(test)]
mod tests;
