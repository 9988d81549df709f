//! Effective settings of a replica: its configuration, then the tuned settings for this model and machine, then the
//! defaults; separately for each key.
//!
//! A precision changes the computed rows, and with them the identity of the model. So it is never taken from tuning: a
//! replica computes in the configured precision, or f32 by default, and uses the settings that were tuned for that
//! precision.

use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use replica_core::Precision;
use replica_core::batch::BatchSettings;

use super::file::TunedModel;
use crate::config::{BatchOverrides, Config};

/// Effective settings of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EffectiveSettings {
    /// Number format.
    pub precision: Precision,
    /// Engine threads.
    pub threads: NonZeroUsize,
    /// Batch settings.
    pub batch: BatchSettings,
}

/// Combines the three sources. Tuned values are limited by configured ones: a batch is at most as large as the queue,
/// and an interactive batch at most as large as any.
pub fn effective_settings(config: &Config, tuned: Option<&TunedModel>) -> EffectiveSettings {
    let precision = config.engine.precision.unwrap_or(Precision::F32);
    let choice = tuned.and_then(|tuned| tuned.choices.iter().find(|choice| choice.precision == precision));
    let found = choice.map_or_else(BatchSettings::default, |choice| choice.batch);
    let BatchOverrides { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max } =
        config.batch;
    let batch_tokens = batch_tokens.unwrap_or(found.batch_tokens).min(config.limits.max_queue_tokens);
    let interactive_tokens = interactive_batch_tokens.unwrap_or(found.interactive_batch_tokens);
    let cores = || available_parallelism().unwrap_or(NonZeroUsize::MIN);
    EffectiveSettings {
        precision,
        threads: config.threads.engine.or(choice.map(|choice| choice.threads)).unwrap_or_else(cores),
        batch: BatchSettings {
            batch_tokens,
            interactive_batch_tokens: interactive_tokens.min(batch_tokens),
            bulk_share_percent: bulk_share_percent.unwrap_or(found.bulk_share_percent),
            window_max: window_max.unwrap_or(found.window_max),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::file::Hardware;
    use super::super::plan::TunedChoice;
    use super::*;

    const LEAST: &str = "listen = \"127.0.0.1:0\"\nnames = [\"a\"]\nmodel = \"pypi://a\"\n";

    fn config(more: &str) -> Config {
        format!("{LEAST}{more}").parse().expect("a configuration")
    }

    fn tuned(precision: Precision, threads: usize) -> TunedModel {
        let batch = BatchSettings {
            batch_tokens: 4000,
            interactive_batch_tokens: 1000,
            bulk_share_percent: 30,
            window_max: Duration::from_micros(250),
        };
        let threads = NonZeroUsize::new(threads).expect("a count");
        let choice = TunedChoice { precision, threads, batch, tokens_per_second: 1.0, target_met: None };
        let hardware = Hardware { processor: String::new(), cores: 1, instruction_set: String::new() };
        let (source, digest) = (String::new(), String::new());
        TunedModel { source, digest, hardware, choices: vec![choice], busy_share: None }
    }

    #[test]
    fn without_tuned_settings_the_defaults_apply() {
        let effective = effective_settings(&config(""), None);
        assert_eq!((effective.precision, effective.batch), (Precision::F32, BatchSettings::default()));
        assert_eq!(Some(effective.threads), available_parallelism().ok());
    }

    #[test]
    fn the_precision_is_never_taken_from_tuned_settings() {
        let mut both = tuned(Precision::Int8, 3);
        both.choices.extend(tuned(Precision::F32, 2).choices);
        let check = |toml: &str, tuned: &TunedModel, precision: Precision, threads: Option<usize>| {
            let effective = effective_settings(&config(toml), Some(tuned));
            let expected = threads.and_then(NonZeroUsize::new).or(available_parallelism().ok());
            assert_eq!((effective.precision, Some(effective.threads)), (precision, expected), "{toml}");
        };
        check("", &both, Precision::F32, Some(2));
        check("engine = { precision = \"int8\" }\n", &both, Precision::Int8, Some(3));
        check("engine = { precision = \"f32\" }\n", &both, Precision::F32, Some(2));
        // Settings of another precision do not apply to this one.
        let other = tuned(Precision::Int8, 3);
        check("engine = { precision = \"f32\" }\n", &other, Precision::F32, None);
        check("", &other, Precision::F32, None);
    }

    #[test]
    fn tuned_settings_apply_where_the_configuration_has_no_value() {
        let tuned = tuned(Precision::F32, 3);
        let effective = effective_settings(&config(""), Some(&tuned));
        assert_eq!((effective.threads.get(), effective.batch), (3, tuned.choices[0].batch));
        let effective = effective_settings(
            &config("[threads]\nengine = 1\n[batch]\nbatch_tokens = 600\nwindow_max_ms = 0\n"),
            Some(&tuned),
        );
        let expected = BatchSettings {
            batch_tokens: 600,
            interactive_batch_tokens: 600,
            bulk_share_percent: 30,
            window_max: Duration::ZERO,
        };
        assert_eq!((effective.threads.get(), effective.batch), (1, expected));
    }
}
