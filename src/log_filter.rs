//! `meridian log`: shows the filter of the log of a process, and changes it.

use crate::cli::LogOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail, operations_port};
use configuration::duration;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;
use telemetry::logs::http;

/// Runs the command. Fails if the process is unreachable or rejects the filter.
pub(crate) fn main(options: &LogOptions) -> ExitCode {
    let LogOptions { url, filter, lasts, json } = options;
    let (url, lasts) =
        match (operations_port::url("URL", url, [http::PATH.trim_start_matches('/')]), seconds(lasts)) {
            (Ok(url), Ok(lasts)) => (url, lasts),
            (url, lasts) => {
                let problems: Vec<_> = url.err().into_iter().chain(lasts.err()).collect();
                return fail(EXIT_USAGE, &problems);
            }
        };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    let state = runtime.block_on(async {
        match filter {
            Some(filter) => operations_port::put(url, &json!({"filter": filter, "for_s": lasts})).await,
            None => operations_port::get(url).await,
        }
    });
    let state = match state {
        Ok(state) => state,
        Err(problem) => return fail(EXIT_FAILED, &[problem]),
    };
    let text = if *json { format!("{state:#}") } else { format_text(&state) };
    // The reader may have closed the pipe.
    writeln!(std::io::stdout(), "{text}").ok();
    ExitCode::SUCCESS
}

/// Returns the seconds of a duration.
fn seconds(text: &str) -> Result<u64, String> {
    let whole = |length: &Duration| length.subsec_nanos() == 0 && *length <= http::FOR_MAX;
    let length = duration::parse(text).filter(whole);
    length.map(|length| length.as_secs()).ok_or_else(|| {
        let max = duration::write(http::FOR_MAX);
        format!("--for {text}: not a duration of whole seconds up to {max}; write one, such as 10m, or 0s for no end")
    })
}

/// Formats the filter of a process as text.
fn format_text(state: &Value) -> String {
    let text = |key: &str| state[key].as_str().unwrap_or("-").to_owned();
    let mut lines =
        vec![format!("filter    {}", text("filter")), format!("at start  {}", text("filter_at_start"))];
    if let Some(left) = state["restored_in_s"].as_u64() {
        lines.push(format!("restored  in {}", duration::write(Duration::from_secs(left))));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_whole_seconds_and_a_limit() {
        for (text, expected) in [("10m", Some(600)), ("0s", Some(0)), ("24h", Some(86_400))] {
            assert_eq!(seconds(text).ok(), expected, "{text}");
        }
        for text in ["500ms", "25h", "10", "long"] {
            let problem = seconds(text).expect_err(text);
            assert!(
                problem.starts_with(&format!("--for {text}: ")) && problem.contains("up to 24h"),
                "{problem}"
            );
        }
    }

    #[test]
    fn the_end_of_a_changed_filter_is_shown() {
        let state =
            |left: Value| json!({"filter": "debug", "filter_at_start": "info", "restored_in_s": left});
        assert_eq!(format_text(&state(json!(90))), "filter    debug\nat start  info\nrestored  in 90s");
        assert_eq!(format_text(&state(Value::Null)), "filter    debug\nat start  info");
    }
}
