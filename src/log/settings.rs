//! Settings of the log from the environment.

use configuration::did_you_mean;
use std::ffi::OsStr;
use telemetry::log_filter::{FilterLevel, LogFilter};

/// Variable with the filter of the log.
const FILTER_VARIABLE: &str = "MERIDIAN_LOG";
/// Variable with the format of the log.
const FORMAT_VARIABLE: &str = "MERIDIAN_LOG_FORMAT";

/// Format of the lines of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// Text.
    Text,
    /// A JSON object per line.
    Json,
}

impl LogFormat {
    /// Formats with their words.
    const WORDS: [(&str, LogFormat); 2] = [("json", LogFormat::Json), ("text", LogFormat::Text)];
}

/// Settings of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogSettings {
    pub(crate) filter: LogFilter,
    pub(crate) format: LogFormat,
}

impl LogSettings {
    /// Reads the variables of this process. Targets without a level have `default`.
    ///
    /// # Errors
    ///
    /// All problems, each with the variable, its value and the valid values.
    pub(crate) fn of_process(default: FilterLevel) -> Result<LogSettings, Vec<String>> {
        let [filter, format] = [FILTER_VARIABLE, FORMAT_VARIABLE].map(std::env::var_os);
        LogSettings::parse(filter.as_deref(), format.as_deref(), default)
    }

    /// Parses the values of the variables.
    fn parse(
        filter: Option<&OsStr>,
        format: Option<&OsStr>,
        default: FilterLevel,
    ) -> Result<LogSettings, Vec<String>> {
        let filter = text(FILTER_VARIABLE, filter).and_then(|text| {
            LogFilter::parse(text, default).map_err(|error| format!("{FILTER_VARIABLE}={text}: {error}"))
        });
        let format = text(FORMAT_VARIABLE, format).and_then(read_format);
        match (filter, format) {
            (Ok(filter), Ok(format)) => Ok(LogSettings { filter, format }),
            (filter, format) => Err(filter.err().into_iter().chain(format.err()).collect()),
        }
    }
}

/// Returns the text of a variable; it is empty if the variable is not set.
fn text<'v>(name: &str, value: Option<&'v OsStr>) -> Result<&'v str, String> {
    let value = value.unwrap_or_default();
    value.to_str().ok_or_else(|| format!("{name}={}: not UTF-8; set it to a text in UTF-8", value.display()))
}

fn read_format(text: &str) -> Result<LogFormat, String> {
    if text.is_empty() {
        return Ok(LogFormat::Text);
    }
    let known = LogFormat::WORDS.iter().find(|(word, _)| *word == text);
    known.map(|(_, format)| *format).ok_or_else(|| {
        let near = did_you_mean(text, LogFormat::WORDS.map(|(word, _)| word));
        format!("{FORMAT_VARIABLE}={text}: unknown format{near}; write json or text")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    fn parse(filter: Option<&str>, format: Option<&str>) -> Result<LogSettings, Vec<String>> {
        LogSettings::parse(filter.map(OsStr::new), format.map(OsStr::new), FilterLevel::Info)
    }

    #[test]
    fn absent_and_empty_variables_have_the_defaults() {
        let default = LogSettings { filter: LogFilter::new(FilterLevel::Info), format: LogFormat::Text };
        for (filter, format) in [(None, None), (Some(""), Some("")), (Some("info"), Some("text"))] {
            assert_eq!(parse(filter, format), Ok(default.clone()));
        }
        let json = LogSettings { filter: LogFilter::new(FilterLevel::Warn), format: LogFormat::Json };
        assert_eq!(parse(Some("warn"), Some("json")), Ok(json));
    }

    #[test]
    fn all_invalid_variables_are_reported_with_their_values() {
        let problems = parse(Some("info,warning"), Some("jsn")).unwrap_err();
        let [filter, format] = problems.as_slice() else { panic!("{problems:?}") };
        let expected =
            "MERIDIAN_LOG=info,warning: \"warning\" is not a level; did you mean warn?; write off, error";
        assert!(filter.starts_with(expected), "{filter}");
        assert_eq!(format, "MERIDIAN_LOG_FORMAT=jsn: unknown format; did you mean json?; write json or text");
        let broken = OsStr::from_bytes(b"info\xff");
        let problems = LogSettings::parse(Some(broken), Some(broken), FilterLevel::Info).unwrap_err();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].starts_with("MERIDIAN_LOG=info\u{fffd}: not UTF-8"), "{problems:?}");
    }
}
