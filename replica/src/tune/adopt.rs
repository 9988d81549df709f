//! What a replica runs with: its own configuration first, then what was tuned for this model on this machine, then the
//! defaults; each key by itself.
//!
//! A precision changes the rows that are computed, and with them the identity of the model. So it is never tuned: a replica
//! computes in the precision of its configuration, or in f32 where that says nothing, and takes the settings that were tuned
//! for that precision.

use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use replica_core::Precision;
use replica_core::batch::BatchSettings;

use super::file::Tuned;
use crate::config::{BatchOverrides, Config};

/// What a replica runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The number format.
    pub precision: Precision,
    /// Threads of the engine.
    pub threads: NonZeroUsize,
    /// How batches are made.
    pub batch: BatchSettings,
}

/// Puts the three together. What is found stays within what is given: no batch is larger than the queue, and none of
/// lookups larger than any.
pub fn adopt(config: &Config, tuned: Option<&Tuned>) -> Adopted {
    let precision = config.engine.precision.unwrap_or(Precision::F32);
    let choice = tuned.and_then(|tuned| tuned.choices.iter().find(|choice| choice.precision == precision));
    let found = choice.map_or_else(BatchSettings::default, |choice| choice.batch);
    let BatchOverrides { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max } =
        config.batch;
    let batch_tokens = batch_tokens.unwrap_or(found.batch_tokens).min(config.limits.max_queue_tokens);
    let of_lookups = interactive_batch_tokens.unwrap_or(found.interactive_batch_tokens);
    let cores = || available_parallelism().unwrap_or(NonZeroUsize::MIN);
    Adopted {
        precision,
        threads: config.threads.engine.or(choice.map(|choice| choice.threads)).unwrap_or_else(cores),
        batch: BatchSettings {
            batch_tokens,
            interactive_batch_tokens: of_lookups.min(batch_tokens),
            bulk_share_percent: bulk_share_percent.unwrap_or(found.bulk_share_percent),
            window_max: window_max.unwrap_or(found.window_max),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::file::Hardware;
    use super::super::plan::Choice;
    use super::*;

    const LEAST: &str = "listen = \"127.0.0.1:0\"\nnames = [\"a\"]\nmodel = \"pypi://a\"\n";

    fn config(more: &str) -> Config {
        format!("{LEAST}{more}").parse().expect("a configuration")
    }

    fn tuned(precision: Precision, threads: usize) -> Tuned {
        let batch = BatchSettings {
            batch_tokens: 4000,
            interactive_batch_tokens: 1000,
            bulk_share_percent: 30,
            window_max: Duration::from_micros(250),
        };
        let threads = NonZeroUsize::new(threads).expect("a count");
        let choice = Choice { precision, threads, batch, tokens_per_second: 1.0, target_met: None };
        let hardware = Hardware { processor: String::new(), cores: 1, instruction_set: String::new() };
        Tuned { source: String::new(), digest: String::new(), hardware, choices: vec![choice] }
    }

    #[test]
    fn without_a_tuned_file_the_defaults_hold() {
        let adopted = adopt(&config(""), None);
        assert_eq!((adopted.precision, adopted.batch), (Precision::F32, BatchSettings::default()));
        assert_eq!(Some(adopted.threads), available_parallelism().ok());
    }

    #[test]
    fn a_precision_is_never_taken_from_what_was_tuned() {
        let mut both = tuned(Precision::Int8, 3);
        both.choices.extend(tuned(Precision::F32, 2).choices);
        let check = |toml: &str, tuned: &Tuned, precision: Precision, threads: Option<usize>| {
            let adopted = adopt(&config(toml), Some(tuned));
            let expected = threads.and_then(NonZeroUsize::new).or(available_parallelism().ok());
            assert_eq!((adopted.precision, Some(adopted.threads)), (precision, expected), "{toml}");
        };
        check("", &both, Precision::F32, Some(2));
        check("engine = { precision = \"int8\" }\n", &both, Precision::Int8, Some(3));
        check("engine = { precision = \"f32\" }\n", &both, Precision::F32, Some(2));
        // Settings of another precision say nothing about this one.
        let other = tuned(Precision::Int8, 3);
        check("engine = { precision = \"f32\" }\n", &other, Precision::F32, None);
        check("", &other, Precision::F32, None);
    }

    #[test]
    fn what_was_tuned_holds_where_the_configuration_is_silent() {
        let tuned = tuned(Precision::F32, 3);
        let adopted = adopt(&config(""), Some(&tuned));
        assert_eq!((adopted.threads.get(), adopted.batch), (3, tuned.choices[0].batch));
        let adopted = adopt(
            &config("[threads]\nengine = 1\n[batch]\nbatch_tokens = 600\nwindow_max_ms = 0\n"),
            Some(&tuned),
        );
        let expected = BatchSettings {
            batch_tokens: 600,
            interactive_batch_tokens: 600,
            bulk_share_percent: 30,
            window_max: Duration::ZERO,
        };
        assert_eq!((adopted.threads.get(), adopted.batch), (1, expected));
    }
}
