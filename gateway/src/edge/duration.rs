//! Durations in the format of OpenAI's headers.

use gateway_core::decimal;
use std::time::Duration;

/// Formats a duration: `80ms`, `2.5s`, `1m30s`.
pub(super) fn openai_duration(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    match millis {
        0..1_000 => decimal::text(|text| {
            decimal::push(text, millis);
            text.push_str("ms");
        }),
        1_000..60_000 => format!("{}s", (millis / 10) as f64 / 100.0),
        _ => format!("{}m{}s", millis / 60_000, millis % 60_000 / 1_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_the_format_of_openai() {
        let check = |millis, expected| assert_eq!(openai_duration(Duration::from_millis(millis)), expected);
        check(0, "0ms");
        check(999, "999ms");
        check(1_000, "1s");
        check(2_512, "2.51s");
        check(90_900, "1m30s");
    }
}
