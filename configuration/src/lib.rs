//! Reader of configuration files: TOML to validated values, with all problems of a file in one run.
//!
//! A file kind declares each of its keys once, with [`section!`]: name, type, default, limits, example and description.
//! From the declaration follow the struct, the parser, the error messages and the tables of `docs/configuration.md`
//! ([`reference`]). Deserializing into structs would be shorter, but it stops at the first mistake and loses the lines.
//!
//! In reading order:
//!
//! - [`ConfigFile`]: a parsed file and the problems found in it. A problem names a key by its path (`scaling.ports`,
//!   `tenant[2].weight`), from which its line follows.
//! - [`ConfigValue`]: a type that can be the value of a key; [`Section`]: a table of such keys.
//! - [`Files`]: the files and environment variables that a configuration names; [`Environment`]: those of a process.
//! - [`duration`]: the one syntax of durations; [`did_you_mean`]: suggestions for misspelt words.
//!
//! The values of keys may be shown in messages: secrets are never written in a configuration file, only the names of the
//! files and variables that hold them.

mod document;
pub mod duration;
mod environment;
mod files;
mod reference;
mod section;
mod suggest;
mod value;

pub use document::{ConfigFile, Problem, named, segment};
pub use environment::{Environment, NotUtf8};
pub use files::Files;
pub use reference::reference;
pub use section::{Check, ConfigField, ConfigValue, Key, Rule, Section, Table, of_defaults};
pub use suggest::{MAX_SUGGESTIONS, did_you_mean, nearest};
pub use value::{Limits, NoLimit, OneOrMany, Rows, text_of};
