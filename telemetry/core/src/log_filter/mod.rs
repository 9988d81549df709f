//! Filter of the log: the lowest level of the events that are logged, by target.
//!
//! A filter is a list of directives, separated by commas: `LEVEL`, the default, and `TARGET=LEVEL`. It is a part of the syntax of
//! `tracing_subscriber::EnvFilter`, whose parser takes every word that is no level for a target: `warning` and `inof` switch off the
//! whole log there. Here such a word is an error. Spans, fields and regular expressions are not supported, because no event of Meridian
//! is in a span.
//!
//! A target matches all targets that begin with it, as in `RUST_LOG`, and the longest one decides. [`state`] has the filter of a process,
//! which can be changed for a time.

pub mod state;

use configuration::did_you_mean;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Maximum number of directives: several times the number of crates in this workspace.
pub const DIRECTIVES_MAX: usize = 128;

/// Valid directives, for messages.
const SYNTAX: &str = "write off, error, warn, info, debug or trace, or TARGET=LEVEL such as gateway::edge=debug, separated by commas";

/// Lowest level of the events that are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FilterLevel {
    /// No events.
    Off,
    /// Errors.
    Error,
    /// Warnings and errors.
    Warn,
    /// The line of each request, and all above.
    Info,
    /// Details, and all above.
    Debug,
    /// All events.
    Trace,
}

impl FilterLevel {
    /// All levels, from none to all events.
    pub const ALL: [FilterLevel; 6] = [
        FilterLevel::Off,
        FilterLevel::Error,
        FilterLevel::Warn,
        FilterLevel::Info,
        FilterLevel::Debug,
        FilterLevel::Trace,
    ];

    /// Returns the word of a filter.
    pub fn as_str(self) -> &'static str {
        match self {
            FilterLevel::Off => "off",
            FilterLevel::Error => "error",
            FilterLevel::Warn => "warn",
            FilterLevel::Info => "info",
            FilterLevel::Debug => "debug",
            FilterLevel::Trace => "trace",
        }
    }

    /// Returns the level with this word, ignoring case.
    fn parse(word: &str) -> Option<FilterLevel> {
        FilterLevel::ALL.into_iter().find(|level| level.as_str().eq_ignore_ascii_case(word))
    }
}

/// Filter of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter {
    default: FilterLevel,
    targets: BTreeMap<String, FilterLevel>,
}

/// Problem of a filter: the directive, and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilterError(String);

impl LogFilter {
    /// Creates a filter with one level for all targets.
    pub fn new(default: FilterLevel) -> LogFilter {
        LogFilter { default, targets: BTreeMap::new() }
    }

    /// Parses a filter. Targets without a directive have its level, or `default` if it has none; an empty text is `default`.
    ///
    /// # Errors
    ///
    /// When a directive is invalid, or when two of them are for the same target.
    pub fn parse(text: &str, default: FilterLevel) -> Result<LogFilter, LogFilterError> {
        let mut filter = LogFilter::new(default);
        if text.trim().is_empty() {
            return Ok(filter);
        }
        let mut given = None;
        for (index, directive) in text.split(',').map(str::trim).enumerate() {
            if index == DIRECTIVES_MAX {
                return Err(LogFilterError(format!("more than {DIRECTIVES_MAX} directives; write fewer")));
            }
            let Directive { target, level } = directive.parse()?;
            let previous = match &target {
                None => given.replace(level),
                Some(target) => filter.targets.insert(target.clone(), level),
            };
            if let Some(previous) = previous {
                let of = target.map_or("the default".to_owned(), |target| format!("the target {target}"));
                let (previous, level) = (previous.as_str(), level.as_str());
                return Err(LogFilterError(format!(
                    "{of} has two levels, {previous} and {level}; remove one of them"
                )));
            }
        }
        filter.default = given.unwrap_or(default);
        Ok(filter)
    }

    /// Returns the level of the targets without a directive.
    pub fn default_level(&self) -> FilterLevel {
        self.default
    }

    /// Returns the lowest level that is logged of a target: that of the longest directive with which the target begins.
    pub fn level(&self, target: &str) -> FilterLevel {
        let matching = self.targets.iter().filter(|(prefix, _)| target.starts_with(prefix.as_str()));
        matching.max_by_key(|(prefix, _)| prefix.len()).map_or(self.default, |(_, level)| *level)
    }

    /// Returns whether events of this target and level are logged.
    pub fn enables(&self, target: &str, level: FilterLevel) -> bool {
        level <= self.level(target)
    }

    /// Returns the lowest level that is logged of any target.
    pub fn lowest_level(&self) -> FilterLevel {
        self.targets.values().copied().fold(self.default, FilterLevel::max)
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.default.as_str())?;
        self.targets.iter().try_for_each(|(target, level)| write!(f, ",{target}={}", level.as_str()))
    }
}

impl fmt::Display for LogFilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LogFilterError {}

/// Directive of a filter; without a target, the default level.
struct Directive {
    target: Option<String>,
    level: FilterLevel,
}

impl FromStr for Directive {
    type Err = LogFilterError;

    fn from_str(text: &str) -> Result<Directive, LogFilterError> {
        let invalid = |problem: String| Err(LogFilterError(format!("{problem}; {SYNTAX}")));
        if text.is_empty() {
            return invalid("a directive is empty".to_owned());
        }
        if text.contains(['[', ']', '{', '}', '"', '/', '*', '^', '$']) {
            return invalid(format!("{text:?}: spans, fields and regular expressions are not supported"));
        }
        let Some((target, word)) = text.split_once('=') else {
            return match FilterLevel::parse(text) {
                Some(level) => Ok(Directive { target: None, level }),
                None if text.contains("::") => invalid(format!("{text:?} is a target without a level")),
                None => invalid(format!("{text:?} is not a level{}", suggested(text))),
            };
        };
        let (target, word) = (target.trim(), word.trim());
        if target.is_empty() {
            return invalid(format!("{text:?} has no target"));
        }
        if !is_module_path(target) {
            let path = target.replace('-', "_");
            let hint = if is_module_path(&path) { format!("; did you mean {path}?") } else { String::new() };
            return invalid(format!("{target:?} is not the path of a module{hint}"));
        }
        if word.is_empty() {
            return invalid(format!("{text:?} has no level"));
        }
        match FilterLevel::parse(word) {
            Some(level) => Ok(Directive { target: Some(target.to_owned()), level }),
            None => invalid(format!("{text:?}: {word:?} is not a level{}", suggested(word))),
        }
    }
}

/// Formats the levels that a word resembles.
fn suggested(word: &str) -> String {
    did_you_mean(word, FilterLevel::ALL.into_iter().map(FilterLevel::as_str))
}

/// Returns whether a text is a path of names, such as `gateway::edge`.
fn is_module_path(text: &str) -> bool {
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    text.split("::").all(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use FilterLevel::{Debug, Error, Info, Off, Trace, Warn};

    #[test]
    fn a_filter_has_a_default_and_levels_of_targets() {
        let check = |text: &str, written: &str| {
            let filter = LogFilter::parse(text, Info).unwrap();
            assert_eq!(filter.to_string(), written, "{text}");
            assert_eq!(LogFilter::parse(written, Off), Ok(filter), "{written}");
        };
        check("", "info");
        check(" ", "info");
        check("warn", "warn");
        check("WARN", "warn");
        check("off", "off");
        check("gateway::edge=debug", "info,gateway::edge=debug");
        check("scheduler=info , warn,access=off", "warn,access=off,scheduler=info");
        check("anything::at_all2 = Trace", "info,anything::at_all2=trace");
    }

    #[test]
    fn the_longest_target_decides() {
        let filter = LogFilter::parse("warn,gateway=info,gateway::edge=debug,access=off", Info).unwrap();
        for (target, level) in [
            ("gateway::edge::router", Debug),
            ("gateway::edge", Debug),
            ("gateway::listener", Info),
            ("gateway_core::route", Info),
            ("scheduler", Warn),
            ("access", Off),
        ] {
            assert_eq!(filter.level(target), level, "{target}");
        }
        assert!(filter.enables("gateway::edge", Debug) && !filter.enables("gateway::edge", Trace));
        assert!(!filter.enables("access", Error));
        assert_eq!(filter.lowest_level(), Debug);
        assert_eq!(LogFilter::parse("trace,a=off", Info).unwrap().lowest_level(), Trace);
    }

    #[test]
    fn a_mistake_is_an_error_that_names_the_fix() {
        let too_many = vec!["a=info"; DIRECTIVES_MAX + 1];
        let too_many: Vec<_> = too_many.iter().enumerate().map(|(at, text)| format!("t{at}{text}")).collect();
        for (text, part) in [
            ("warning", "\"warning\" is not a level; did you mean warn?; write off, error, warn, info"),
            ("inof", "\"inof\" is not a level; did you mean info?"),
            ("info,Err", "\"Err\" is not a level; did you mean error?"),
            ("gateway", "\"gateway\" is not a level; write off"),
            ("gateway::edge", "\"gateway::edge\" is a target without a level"),
            ("error=", "\"error=\" has no level"),
            ("=debug", "\"=debug\" has no target"),
            ("gateway=debgu", "\"gateway=debgu\": \"debgu\" is not a level; did you mean debug?"),
            ("gateway=a=debug", "\"a=debug\" is not a level"),
            (
                "gateway-core=debug",
                "\"gateway-core\" is not the path of a module; did you mean gateway_core?",
            ),
            ("gateway:edge=debug", "\"gateway:edge\" is not the path of a module; write"),
            ("gateway::=debug", "\"gateway::\" is not the path of a module"),
            ("info,,gateway=debug", "a directive is empty"),
            ("info,", "a directive is empty"),
            ("info,warn", "the default has two levels, info and warn; remove one"),
            ("a=info,a=debug", "the target a has two levels, info and debug"),
            ("[request]=debug", "\"[request]=debug\": spans, fields and regular expressions are not"),
            ("gateway[request{id=\"1\"}]=debug", "are not supported"),
            ("info/text.*", "are not supported"),
            (&too_many.join(","), "more than 128 directives"),
        ] {
            let problem = LogFilter::parse(text, Info).unwrap_err().to_string();
            assert!(problem.contains(part), "{text}: {problem}");
        }
        assert!(LogFilter::parse(&too_many[1..].join(","), Info).is_ok(), "at the limit");
    }
}
